"""How a federation is doing: its members, its runs and what happened, read from its folder and from the server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coterie.algorithms import registry
from coterie.errors import ConfigError, CoterieError
from coterie.federation import agreement
from coterie.runs.storage import MetricsLog, TimingsLog, events, read_config, read_summary

_EVENTS = 20  # of the last ones, that are shown of each run
_MODELS = ("personal", "global", "hybrid")


class LastSeen(NamedTuple):
    """What the server knows of a member's node: its status, and when it last heard of it, in seconds since 1970."""

    status: str
    at: float | None


@dataclass(frozen=True)
class MemberStatus:
    """One member, as the server sees it."""

    name: str
    status: str
    last_seen: float | None


@dataclass(frozen=True)
class RunStatus:
    """One run, as its folder has it."""

    name: str
    algorithm: str
    title: str
    rounds: int
    planned: int
    finished: bool
    replies: int | None = None
    seconds: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    epsilon: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    event_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FederationStatus:
    """A federation at one moment."""

    name: str
    server_answers: bool
    members: tuple[MemberStatus, ...]
    runs: tuple[RunStatus, ...]


class StatusReader:
    """Reads how a federation is doing; of a run whose files have not changed, nothing is read again.

    Parameters
    ----------
    folder
        The project folder.
    nodes
        Gives what the server knows of nodes, by their public keys in OpenSSH's form; a
        :class:`~coterie.errors.ConfigError` where it does not answer.
    """

    def __init__(self, folder: Path, nodes: Callable[[], Mapping[str, LastSeen]]) -> None:
        self._folder, self._nodes = folder, nodes
        self._known: dict[Path, tuple[object, RunStatus]] = {}

    def read(self) -> FederationStatus:
        """Look at everything."""
        agreed = agreement.read(self._folder / agreement.FILE)
        try:
            found: Mapping[str, LastSeen] | None = self._nodes()
        except ConfigError:
            found = None
        members = []
        for member in agreed.members:
            here = [seen for key, seen in (found or {}).items() if agreement.same_key(key, member.key or "")]
            none = LastSeen("unknown" if found is None else "not let in", None)
            members.append(MemberStatus(member.name, *(here[0] if here else none)))
        names = {number: member.name for number, member in enumerate(agreed.members)}
        runs = [
            status
            for path in sorted(each.parent for each in (self._folder / "runs").glob("*/config.yaml"))
            if (status := self._run(path, names)) is not None
        ]
        return FederationStatus(agreed.name, found is not None, tuple(members), tuple(runs))

    def _run(self, path: Path, names: Mapping[int, str]) -> RunStatus | None:
        known = self._known.get(path)
        try:
            files = [*path.glob("*.jsonl"), *path.glob("*.json"), *path.glob("metrics*"), *path.glob("metrics/*")]
            state = tuple(sorted((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in files))
            if known is not None and known[0] == state:
                return known[1]
            found = _read_run(path, names)
        except (CoterieError, OSError, ValueError, KeyError):  # it is being written; the next look sees it whole
            return None if known is None else known[1]
        self._known[path] = state, found
        return found


def _read_run(path: Path, names: Mapping[int, str]) -> RunStatus:
    config, metrics = read_config(path), MetricsLog(path).read()
    timings = TimingsLog(path / "timings.jsonl").read() if (path / "timings.jsonl").exists() else None
    wire = metrics[metrics["model"] == "federation"]
    last = int(metrics["round"].max()) if len(metrics) else 0
    now = wire[wire["round"] == wire["round"].max()] if len(wire) else wire
    latest = dict(zip(now["metric"].astype(str), now["value"], strict=True))
    sums = wire.groupby("metric", observed=True)["value"].sum().to_dict() if len(wire) else {}
    test = metrics[(metrics["split"] == "test") & metrics["model"].isin(_MODELS)]
    scores: dict[str, float] = {}
    if len(test):
        means = test[test["round"] == test["round"].max()].groupby(["model", "metric"], observed=True)["value"].mean()
        scores = {f"{model} {metric}": float(value) for (model, metric), value in means.items() if math.isfinite(value)}
    happened = events.read(path)
    seconds = None
    if timings is not None and len(timings):
        seconds = float(timings.set_index("round").sum(axis=1).iloc[-1])
    known: dict[str, Any] = {} if "wire_replies" not in latest else {"replies": int(latest["wire_replies"])}
    return RunStatus(
        path.name,
        str(config["algorithm"]),
        registry.title(config["algorithm"]),
        last,
        int(config["rounds"]),
        read_summary(path) is not None,
        seconds=seconds,
        bytes_down=int(sums.get("wire_down", 0)),
        bytes_up=int(sums.get("wire_up", 0)),
        epsilon=float(latest["epsilon"]) if math.isfinite(latest.get("epsilon", math.nan)) else None,
        scores=scores,
        events=tuple(event.told(names) for event in reversed(happened[-_EVENTS:])),
        event_counts=dict(Counter(event.what for event in happened)),
        **known,
    )
