"""Who gains and who loses, on runs whose answers are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.results import Result, figures, gains
from coterie.results.figures import Line, robust_range
from coterie.runs.storage.answers import write_answers
from tests.results.report.folders import write_run

ROUNDS, SAMPLES = 3, 5


def answered(path: Path, method: str, right: list[list[int]], seed: int = 1) -> Result:
    """A run whose two clients' samples were answered so; the scores that it recorded are others."""
    run = write_run(path, method, seed, clients=2, rounds=ROUNDS, models=("personal",), weights=False)
    answers = np.where(np.concatenate(right), 0.9, -0.6).astype(np.float32)
    write_answers(path, ROUNDS, {"personal": (np.repeat(np.arange(2, dtype=np.int32), SAMPLES), answers)})
    return Result(run.path)


def test_each_client_is_tested_on_its_own_samples(tmp_path: Path) -> None:
    alone = answered(tmp_path / "a", "local", [[0, 0, 0, 0, 0], [1, 0, 1, 0, 1]])
    ours = answered(tmp_path / "b", "fedacs", [[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])
    found = gains(ours, alone)
    assert found.test == "exact" and len(found) == 2
    of = found.clients.set_index("client")
    # Five gained and none lost: 2 / 2^5; one each: 1. Adjusted for two: 2/32 * 2/1 and 1.
    assert of["pvalue"].loc[[0, 1]].tolist() == pytest.approx([2 / 32, 1.0], rel=1e-12)
    assert of["adjusted"].loc[[0, 1]].tolist() == pytest.approx([4 / 32, 1.0], rel=1e-12)
    assert (found.helped, found.harmed) == (0, 0)
    assert gains(ours, alone, level=0.2).helped + gains(ours, alone, level=0.2).harmed == 1
    assert found.clients["gain"].is_monotonic_increasing and found.worst == found.clients["gain"].iloc[0]
    assert list(of["name"].loc[[0, 1]]) == ["client 0", "client 1"]
    # Of another round nothing but accuracies is known.
    assert gains(ours, alone, at="best_oracle").test == "bound"
    with pytest.raises(ConfigError, match="seeds 1 and the reference 2"):
        gains(ours, answered(tmp_path / "c", "local", [[1] * 5, [1] * 5], seed=2))


def test_a_few_cells_do_not_take_all_colours() -> None:
    # 1000 numbers from 0 to 1 and one of 50: the middle 96 % end at about 0.98, and 50 lies far beyond.
    values = np.append(np.linspace(0, 1, 1000), 50.0)
    (low, high), said = robust_range(values)
    assert low == 0.0 and high == pytest.approx(np.quantile(values, 0.98)) and "98% quantile; up to 50" in said
    assert robust_range(np.linspace(0, 1, 1000)) == ((0.0, 1.0), "")
    sparse = np.zeros(1000)
    sparse[:3] = 0.5  # all there is to see
    assert robust_range(sparse) == ((0.0, 0.5), "")


def test_fourteen_methods_look_different() -> None:
    styles = figures.styles([Line(f"m{number}") for number in range(14)])
    assert len({style.colour for style in styles.values()}) == 14
    both = figures.styles([Line(f"m{number}", setting) for setting in ("a", "b") for number in range(14)])
    assert len({(style.colour, style.dash) for style in both.values()}) == 28
