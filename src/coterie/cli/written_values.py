"""Values as they are written on the command line: ``key=value``, ``key=a,b``, and seeds among other words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from coterie.errors import ConfigError


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read the ``key=value`` pairs of ``--set``, values as YAML."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ConfigError(f"--set is {pair!r}, but must be key=value, for instance --set p=0.5")
        if key in settings:
            raise ConfigError(f"--set gives {key!r} twice")
        try:
            settings[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}: {text!r} is not a valid value") from error
    return settings


def parse_lists(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """Read the ``key=a,b,c`` pairs of ``--tune``, values as YAML."""
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key or not text:
            raise ConfigError(f"--tune is {pair!r}, but must be key=value,value, for instance --tune lr=0.01,0.1")
        if key in found:
            raise ConfigError(f"--tune gives {key!r} twice")
        try:
            found[key] = [yaml.safe_load(value) for value in text.split(",")]
        except yaml.YAMLError as error:
            raise ConfigError(f"--tune {key}: {text!r} is not a list of valid values") from error
    return found


def separate_seeds(words: Sequence[str], seeds: Sequence[str]) -> tuple[list[str], list[int]]:
    """Separate names from seeds: of ``--seeds 1 10 100``, the parser takes all numbers but the first for names."""
    numbers = [word for word in words if word.isdecimal()]
    if numbers and not seeds:
        raise ConfigError(f"{numbers[0]!r} is no method: give seeds as --seeds {' '.join(numbers)}")
    given = [part.strip() for text in seeds for part in text.split(",")] + numbers
    for each in given:
        if not each.isdecimal():
            raise ConfigError(f"--seeds has {each!r}, but each must be a whole number of at least 0")
    return [word for word in words if not word.isdecimal()], [int(each) for each in given]
