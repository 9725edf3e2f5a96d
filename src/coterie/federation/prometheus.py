"""How a federation is doing, in the text format that Prometheus reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from coterie.federation.status import FederationStatus, RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[dict[str, str], float | None]


def text_of(status: FederationStatus) -> str:
    """Write every number of a federation under its name, with what it means."""
    lines: list[str] = []
    for name, kind, doc, samples in _families(status):
        found = [(labels, value) for labels, value in samples if value is not None]
        if found:
            lines += [f"# HELP {name} {doc}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_written(labels)} {_number(value)}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _families(status: FederationStatus) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    members, runs = status.members, status.runs
    yield (
        "coterie_server_up",
        "gauge",
        "Whether the server answers.",
        [({"federation": status.name}, float(status.server_answers))],
    )
    yield (
        "coterie_member_online",
        "gauge",
        "Whether a member's node is there.",
        [({"member": each.name}, float(each.status == "online")) for each in members],
    )
    yield (
        "coterie_member_last_seen_timestamp_seconds",
        "gauge",
        "When the server last heard of a member's node.",
        [({"member": each.name}, each.last_seen) for each in members],
    )
    yield "coterie_run_rounds", "gauge", "Rounds that are played.", [(_of(run), float(run.rounds)) for run in runs]
    yield (
        "coterie_run_rounds_planned",
        "gauge",
        "Rounds that the run has.",
        [(_of(run), float(run.planned)) for run in runs],
    )
    yield (
        "coterie_run_finished",
        "gauge",
        "Whether the run is finished.",
        [(_of(run), float(run.finished)) for run in runs],
    )
    yield (
        "coterie_run_replies",
        "gauge",
        "Nodes that replied in the last round.",
        [(_of(run), run.replies) for run in runs],
    )
    yield "coterie_run_round_seconds", "gauge", "Seconds of the last round.", [(_of(run), run.seconds) for run in runs]
    yield (
        "coterie_run_bytes_total",
        "counter",
        "Bytes of messages to nodes (down) and of replies (up).",
        [
            sample
            for run in runs
            for sample in (
                ({**_of(run), "direction": "down"}, float(run.bytes_down)),
                ({**_of(run), "direction": "up"}, float(run.bytes_up)),
            )
        ],
    )
    yield "coterie_run_epsilon", "gauge", "Privacy loss of the run.", [(_of(run), run.epsilon) for run in runs]
    yield (
        "coterie_run_score",
        "gauge",
        "Mean over members of a metric on test samples, after the last round that was evaluated.",
        [
            ({**_of(run), "model": model, "metric": metric}, value)
            for run in runs
            for key, value in run.scores.items()
            for model, _, metric in (key.partition(" "),)
        ],
    )
    yield (
        "coterie_run_events_total",
        "counter",
        "Events by what happened.",
        [({**_of(run), "what": what}, float(count)) for run in runs for what, count in run.event_counts.items()],
    )


def _of(run: RunStatus) -> dict[str, str]:
    return {"run": run.name, "algorithm": run.algorithm}


def _written(labels: dict[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
