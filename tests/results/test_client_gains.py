"""Who gains and who loses, on runs whose answers are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from coterie.config import from_mapping
from coterie.errors import ConfigError
from coterie.results import Result, figures, gains
from coterie.results.figures import Line, robust_range
from coterie.results.figures.over_rounds import evaluated_alike
from coterie.results.run_frames import timed
from coterie.runs.storage import RunFolder
from coterie.runs.storage.answers import write_answers
from tests.results.report.folders import write_run

ROUNDS, SAMPLES = 3, 5


def answered(path: Path, method: str, right: list[list[int]], seed: int = 1) -> Result:
    """A run whose two clients' samples were answered so; the scores that it recorded are others."""
    run = write_run(path, method, seed, clients=2, rounds=ROUNDS, models=("personal",), weights=False)
    answers = np.where(np.concatenate(right), 0.9, -0.6).astype(np.float32)
    personal = np.repeat(np.arange(2, dtype=np.int32), SAMPLES), answers
    write_answers(path, ROUNDS, {"test": {"personal": personal}})
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


def test_rounds_that_not_all_runs_evaluated_make_no_zigzag() -> None:
    # Run 0 has rounds 1 to 4, run 1 only 2 and 4, and run 2 has come to round 2: 1 and 3 are not comparable.
    rows = [(0, number) for number in (1, 2, 3, 4)] + [(1, 2), (1, 4), (2, 2)]
    frame = pd.DataFrame(rows, columns=["run", "round"]).assign(model="personal", line="a", seed=1, value=0.5)
    assert sorted(set(evaluated_alike(frame)["round"])) == [2, 4]


def test_a_round_that_was_not_evaluated_took_no_seconds_for_it(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", from_mapping({"algorithm": "local", "rounds": 3}).plain()) as folder:
        for number in (1, 2, 3):
            if number != 2:
                folder.metrics.append(number, "personal", "test", "accuracy", [0.5], [0])
            folder.metrics.append_bytes(number, up=0, down=0)
            folder.timings.append(number, training=0.5, evaluation=0.1)
        folder.flush()
    shown = timed(Result(tmp_path / "run")).set_index("round")["evaluation"]
    assert shown.isna().tolist() == [False, True, False]


def test_reliability_is_accuracy_within_bins_of_confidence() -> None:
    # Bins of 1/15: 0.9 twice, once right, and 0.6 once, right.
    answers = pd.DataFrame({"line": "a", "model": "personal", "answer": [0.9, -0.9, 0.6]})
    chart = figures.reliability(answers, {"a": figures.Style()})
    assert chart is not None
    diagonal, series = chart.panels[0].series
    np.testing.assert_allclose(diagonal.x, diagonal.y)
    np.testing.assert_allclose(series.x, [0.6, 0.9])
    np.testing.assert_allclose(series.y, [1.0, 0.5])
    assert figures.reliability(answers[:0], {"a": figures.Style()}) is None
