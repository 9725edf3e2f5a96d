"""The progress of a run between machines, as lines of text, read from the run's folder while the run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from coterie.runs.storage import MetricsLog, TimingsLog, events
from coterie.runs.storage.run_files import read_client_names
from coterie.units import format_bytes

_MODELS = ("personal", "global", "hybrid")


class RunMonitor:
    """Reads what is new in one run's folder.

    Parameters
    ----------
    run
        The run's folder; what is in it already is not reported.
    rounds
        How many rounds the run has.
    """

    def __init__(self, run: Path, rounds: int) -> None:
        self._run, self._rounds = run, rounds
        self._events = len(events.read(run))
        self._last_seen: object = None
        self._played: set[int] = set()
        self._measured: set[int] = set()
        list(self._round_lines())

    def new_lines(self) -> Iterator[str]:
        """Describe what happened since the last call, one line for each event, round and evaluation."""
        found = events.read(self._run)
        for event in found[self._events :]:
            if event.what == "resumed":  # rounds after the checkpoint are played again
                self._played = {number for number in self._played if number <= event.round}
                self._measured = {number for number in self._measured if number <= event.round}
            yield event.told(read_client_names(self._run))
        self._events = len(found)
        yield from self._round_lines()

    def _round_lines(self) -> Iterator[str]:
        files = [self._run / "timings.jsonl", *sorted(self._run.glob("metrics*")), *sorted(self._run.glob("metrics/*"))]
        state = [(path.name, path.stat().st_mtime_ns) for path in files if path.exists()]
        if not state or state == self._last_seen:
            return
        self._last_seen = state
        metrics, timings = MetricsLog(self._run).read(), TimingsLog(self._run / "timings.jsonl").read()
        seconds = timings.set_index("round").sum(axis=1)
        federation = metrics[metrics["model"] == "federation"]
        for number in sorted(set(seconds.index) - self._played):
            self._played.add(number)
            facts = federation[federation["round"] == number]
            values = dict(zip(facts["metric"].astype(str), facts["value"], strict=True))
            yield self._round_line(number, float(seconds[number]), values)
        test = metrics[(metrics["split"] == "test") & metrics["model"].isin(_MODELS)]
        for number in sorted(set(test["round"]) - self._measured):
            self._measured.add(number)
            means = test[test["round"] == number].groupby(["model", "metric"], observed=True)["value"].mean()
            each = [
                f"{model} " + ", ".join(f"{metric} {value:.4f}" for metric, value in means[model].items())
                for model in _MODELS
                if model in means.index.get_level_values(0)
            ]
            yield f"after round {number}: {'; '.join(each)}"

    def _round_line(self, number: int, seconds: float, facts: Mapping[str, float]) -> str:
        words = [f"{int(facts['wire_replies'])} nodes replied"] if "wire_replies" in facts else []
        words += [f"{format_bytes(facts[f'wire_{way}'])} {way}" for way in ("down", "up") if f"wire_{way}" in facts]
        words += [f"{seconds:.1f} s"]
        words += [f"epsilon {facts['epsilon']:.4g}"] if "epsilon" in facts else []
        return f"round {number} of {self._rounds}: {', '.join(words)}"
