"""Playing the protocol: a comparison for each method in each setting, of which its entry is kept.

::

    DIR/SETTING/METHOD.json      the entry: finished, and not repeated
    DIR/SETTING/METHOD/          the runs until then, with which the same command goes on

Several processes may play in one folder, each its own methods or settings.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.algorithms import registry
from coterie.errors import RunFolderError
from coterie.results import Result
from coterie.runs.storage.atomic_files import write_text
from coterie.studies.comparison import ComparisonPlan, compare, load_results
from coterie.studies.comparison.standings import chosen_runs
from coterie.studies.leaderboard.entries import LeaderboardEntry, make_entry, read_entry
from coterie.studies.leaderboard.protocol import LeaderboardProtocol, Setting

Results = dict[str, Result | None]
"""Runs by name, ``None`` for one that diverged."""

Tell = Callable[[str], None]
"""Told one sentence at a time what is going on."""


def play(
    protocol: LeaderboardProtocol,
    settings: Sequence[str],
    methods: Sequence[str],
    folder: Path,
    *,
    over: Mapping[str, Any] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = 1,
    keep_runs: bool = False,
    progress: bool = False,
    tell: Tell = lambda sentence: None,
) -> list[LeaderboardEntry]:
    """Play methods in settings, and give their entries; what is finished is not repeated.

    ``over`` stands over the protocol's own values, for a trial with fewer rounds or seeds.
    """

    def played(plan: ComparisonPlan, out: Path) -> Results:
        compare(plan, out, data_dir=data_dir, jobs=jobs, progress=progress)
        return load_results(plan, out)

    found = []
    for setting in [protocol.setting(name) for name in settings]:
        for method in methods:
            algorithm = registry.get(method)
            name = algorithm.name
            if setting.model == "newcomer" and not algorithm.has_personal:
                tell(f"{setting.name}: {name} has no personal models, which newcomers would get")
                continue
            path = folder / setting.name / f"{name}.json"
            plan = protocol.plan(setting, method, over)
            if path.exists():
                found.append(_finished(path, plan))
                continue
            tell(f"{setting.name}: {name}")
            runs = folder / setting.name / name
            if setting.tuning_seeds is None or setting.tuning_seeds >= len(plan.seeds):
                results = played(plan, runs)
                counts = chosen_runs(plan, results, {}, plan.methods[0])
                counted = make_entry(setting, plan, *counts, [*results.values()])
            else:
                counted = _tuned_first(protocol, setting, plan, over, played, runs)
            found.append(counted)
            write_text(path, json.dumps(counted.plain()) + "\n")
            if not keep_runs:
                shutil.rmtree(runs)
    return found


def _tuned_first(
    protocol: LeaderboardProtocol,
    setting: Setting,
    whole: ComparisonPlan,
    over: Mapping[str, Any] | None,
    play_plan: Callable[[ComparisonPlan, Path], Results],
    folder: Path,
) -> LeaderboardEntry:
    """Compare candidates with the first seeds, and play the best of them with the others.

    One that diverges with these counts as one that diverged with all, and the next best takes its place.
    """
    (method,), few = whole.methods, setting.tuning_seeds
    first, rest = ({**(over or {}), "seeds": list(seeds)} for seeds in (whole.seeds[:few], whole.seeds[few:]))
    plan = protocol.plan(setting, method, first)
    results = play_plan(plan, folder / "tuning")
    played = [*results.values()]
    runs, tuned = chosen_runs(plan, results, {}, method)
    while tuned is not None and tuned.chosen is not None:
        key = tuple(tuned.chosen.items())
        others = play_plan(protocol.plan(setting, method, rest, tuned.chosen), folder / f"best-{len(played)}")
        played += others.values()
        runs = runs + [each for each in others.values() if each is not None]
        if len(runs) == len(whole.seeds):
            break
        results |= {run.name: None for run in plan.of({}, method)[key]}
        runs, tuned = chosen_runs(plan, results, {}, method)
    return make_entry(setting, whole, runs, tuned, played)


def _finished(path: Path, plan: ComparisonPlan) -> LeaderboardEntry:
    entry, rounds = read_entry(path), plan.runs[0].config.rounds
    if (entry.rounds, entry.seeds) != (rounds, plan.seeds):
        raise RunFolderError(
            f"{path} is of {entry.rounds} rounds with the seeds {_listed(entry.seeds)}, not of {rounds} with "
            f"{_listed(plan.seeds)}: choose another --out"
        )
    return entry


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def read_entries(folder: Path) -> list[LeaderboardEntry]:
    """Read all entries of a folder."""
    return [read_entry(path) for path in sorted(folder.glob("*/*.json"))]
