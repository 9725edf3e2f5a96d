"""The table of what crosses the wire, made by playing a method and looking at its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.algorithms import registry
from coterie.compute.loop import LoopEngine
from coterie.config import SHORTHANDS
from coterie.federation.agreement import Agreement, Member, Schema
from coterie.federation.party_data import blank_population, engine_of
from coterie.federation.schema import EVALUATE, GLOBAL, LAST, WELCOME, Seen, observe

# Sides that no two of which are equal, so that each can be told by its length.
_CLIENTS, _CLASSES, _HIDDEN, _PIXELS = 7, 11, 13, (1, 6, 5)

LETTERS = {
    "n": "parameters of the model",
    "h": "of which in its head (the last layer)",
    "b": "of which in its body (the others)",
    "m": "members",
    "C": "classes",
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor that crosses the wire.

    Parameters
    ----------
    when
        The exchange.
    way
        ``server → node`` or ``node → server``.
    name
        The tensor's name.
    shape
        Its shape, as a formula.
    to
        Who gets it.
    """

    when: str
    way: str
    name: str
    shape: str
    to: str


def lines(algorithm: str, settings: Mapping[str, Any] | None = None) -> list[TensorEntry]:
    """Observe what a method sends: an entry for each tensor, in the order in which they are sent."""
    agreement = Agreement(
        name="observed",
        members=tuple(Member(name=f"silo-{number}", key=None) for number in range(_CLIENTS)),
        data=Schema(input_shape=_PIXELS, classes=tuple(map(str, range(_CLASSES)))),
        model=f"mlp:hidden={_HIDDEN}",
    )
    config = agreement.experiment(algorithm, dict(settings or {}))
    engine = engine_of(
        config, blank_population(agreement, {split: [2] * _CLIENTS for split in ("train", "validation", "test")})
    )
    assert isinstance(engine, LoopEngine)
    names = {engine.net.layout.size: "n", _CLIENTS: "m", _CLASSES: "C"}
    for part, letter in (("head", "h"), ("body", "b")):
        names.setdefault(engine.net.columns(part).size, letter)
    for name, value in registry.make(algorithm, config.settings).settings().items():
        if name not in SHORTHANDS and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            names.setdefault(value, name)
    found: dict[TensorEntry, None] = {}
    for seen in observe(config, agreement):
        if not seen.purpose.startswith(WELCOME):
            found.setdefault(_entry(seen, names))
    return list(found)


def _entry(seen: Seen, names: Mapping[int, str]) -> TensorEntry:
    shape = " × ".join(names.get(side, str(side)) for side in seen.what.shape) or "1"
    kind = str(seen.what.dtype).removeprefix("torch.")
    when = f"{seen.purpose}, task {seen.task}"
    if seen.purpose == EVALUATE:
        when = {LAST: "evaluation, personal model", GLOBAL: "evaluation, global model"}.get(
            seen.task, f"evaluation, {seen.task} model"
        )
    whom = "the server" if seen.up else "every node, the same" if seen.same else "each node, its own"
    way = "node → server" if seen.up else "server → node"
    return TensorEntry(when, way, seen.name, shape if kind == "float32" else f"{shape} ({kind})", whom)


def markdown(found: list[TensorEntry]) -> str:
    """Write entries as a Markdown table."""
    rows = ["| when | way | tensor | numbers | who gets it |", "|---|---|---|---|---|"]
    rows += [f"| {line.when} | {line.way} | `{line.name}` | {line.shape} | {line.to} |" for line in found]
    return "\n".join(rows)
