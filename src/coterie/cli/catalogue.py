"""What ``coterie list`` says of all there is, kept in a file: the things themselves take seconds to import.

``python -m coterie.cli.catalogue`` writes the file anew; a test says when it must be. What is not in the file, as a
method in a file of the user's, is described by itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.algorithms import registry
from coterie.data.partitions.registry import SCHEMES
from coterie.data.registry import SOURCES
from coterie.errors import UnknownName
from coterie.models import registry as model_registry
from coterie.options import allowed, plain
from coterie.simulation.attack_registry import ATTACKS

if TYPE_CHECKING:
    from coterie.algorithms.base import Algorithm

FILE = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True)
class CatalogueEntry:
    """One thing in words: its name, what it is, facts about it, and name, default, range and meaning of each option."""

    name: str
    about: str
    facts: tuple[str, ...]
    options: tuple[tuple[str, str, str, str], ...] = ()


def chosen(kind: str, name: str | None) -> Iterator[CatalogueEntry]:
    """Give the entries of a kind, or the one that is asked for; an unknown name is an ``UnknownName``."""
    known = _read()[kind]
    names, describe = _KINDS[kind]
    if name is not None and name not in known and not (kind == "algorithm" and registry.is_file(name)):
        there = list(names())
        if name not in there:
            raise UnknownName(kind, name, there)
    # A metric's own table takes as long to import as all else, so that what the file has is believed.
    for each in ([*known] if kind == "metric" else names()) if name is None else [name]:
        yield known[each] if each in known else describe(each)


@functools.cache
def _read() -> dict[str, dict[str, CatalogueEntry]]:
    found: dict[str, dict[str, CatalogueEntry]] = {}
    for kind, entries in json.loads(FILE.read_text(encoding="utf-8")).items():
        found[kind] = {
            entry["name"]: CatalogueEntry(
                entry["name"], entry["about"], tuple(entry["facts"]), tuple(map(tuple, entry["options"]))
            )
            for entry in entries
        }
    return found


def described() -> dict[str, list[CatalogueEntry]]:
    """Describe all there is, from the things themselves."""
    return {kind: [describe(name) for name in names()] for kind, (names, describe) in _KINDS.items()}


def text() -> str:
    """Give what the file must hold, an entry a line."""
    kinds = []
    for kind, entries in described().items():
        lines = (json.dumps(asdict(entry), ensure_ascii=False) for entry in entries)
        kinds.append(f"{json.dumps(kind)}: [\n" + ",\n".join(lines) + "\n]")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


# ---------------------------------------------------------------------------------------------------------- describing


def _algorithm(name: str) -> CatalogueEntry:
    algorithm = registry.get(name)
    options = tuple(
        (field, plain(info.default), allowed(info), info.description or "")
        for field, info in algorithm.model_fields.items()
    )
    facts = (algorithm.title, algorithm.citation, f"gives {_outputs(algorithm)}")
    return CatalogueEntry(algorithm.name, algorithm.summary(), facts, options)


def _outputs(algorithm: type[Algorithm]) -> str:
    names = ["personal"] if algorithm.has_personal else []
    if algorithm.has_global:
        names.append("global (derived)" if algorithm.derived_global else "global")
    if algorithm.has_hybrid:
        names.append("hybrid")
    return ", ".join(names)


def _data_set(name: str) -> CatalogueEntry:
    info = SOURCES[name].describe()
    facts = (f"{info.samples} samples", info.shape, f"{info.classes} classes", info.obtained, info.citation)
    options = tuple((option.name, option.default, option.allowed, option.doc) for option in info.options)
    return CatalogueEntry(name, info.doc, facts, options)


def _partition(name: str) -> CatalogueEntry:
    scheme = SCHEMES[name]
    options = tuple((option.name, option.default, option.allowed, option.doc) for option in scheme.parameters())
    return CatalogueEntry(name, scheme.summary(), (scheme.citation,), options)


def _model(name: str) -> CatalogueEntry:
    info = next(each for each in model_registry.describe() if each.name == name)
    shape = "x".join(map(str, info.input_shape))
    options = tuple((option, plain(default), "", "") for option, default in info.options.items())
    return CatalogueEntry(name, info.layers, (f"{info.parameters:,} parameters on {shape}", info.source), options)


def _attack(name: str) -> CatalogueEntry:
    from coterie.simulation import attacks

    info = next(each for each in attacks.describe() if each.name == name)
    return CatalogueEntry(
        name, info.summary, (), tuple((option, plain(default), "", "") for option, default in info.options.items())
    )


def _metric(name: str) -> CatalogueEntry:
    from coterie.evaluation import METRICS

    metric = METRICS[name]
    better = "more is better" if metric.higher_is_better else "less is better"
    return CatalogueEntry(name, metric.summary, (", ".join(sorted(metric.tasks)), better))


def _metrics() -> Collection[str]:
    from coterie.evaluation import METRICS

    return METRICS


_KINDS: dict[str, tuple[Callable[[], Collection[str]], Callable[[str], CatalogueEntry]]] = {
    "algorithm": (registry.names, _algorithm),
    "data set": (SOURCES.keys, _data_set),
    "partition": (SCHEMES.keys, _partition),
    "model": (model_registry.names, _model),
    "attack": (ATTACKS.keys, _attack),
    "metric": (_metrics, _metric),
}

if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
