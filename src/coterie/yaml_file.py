"""The one reader of YAML files (experiments, plans, recipes, and the files of a federation), and a writer."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"  # the tag of <<, which takes over the entries of another mapping


# In C, where it was built: ten times as fast. What people wrote is read by the other, whose complaints say more.
PLAIN_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loads YAML that a program wrote."""
_DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def yaml_text(values: Mapping[str, Any]) -> str:
    """Write named values, of plain YAML types, in their order."""
    text: str = yaml.dump(dict(values), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text


def read_plain_text(text: str) -> Any:
    """Read YAML that a program wrote; the caller may change what it is given."""
    return pickle.loads(_parsed(text))  # a new one for each caller, in a fifth of the time of a deep copy


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> bytes:
    # A run's configuration is read back when it is written, when the run has ended, and for a study's table.
    return pickle.dumps(yaml.load(text, Loader=PLAIN_LOADER))


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise yaml.YAMLError(f"{key!r} is given twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path, kind: str = "file") -> dict[str, Any]:
    """Read named values from a YAML file; ``kind`` says in error messages what the file is.

    Raises :class:`~coterie.errors.ConfigError` where the file cannot be read, is not a YAML mapping, or gives a name
    twice.
    """
    where = f"the {kind} {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a name that no file can have, or what is not text
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where} cannot be read: {reason}") from error
    try:
        values = yaml.load(text, Loader=_Loader)
    # The parser's own errors do not cover a date that is none, nor thousands of digits or brackets.
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{where} must hold settings by name, not {found}")
    return values
