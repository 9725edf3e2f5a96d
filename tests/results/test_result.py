from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coterie.errors import RunFolderError
from coterie.results import Result, matrix_table, summarise, table
from coterie.runs.storage import RunFolder
from coterie.tables import Table


def finished(
    path: Path, algorithm: str = "fedacs", accuracy: float = 0.5, validation: bool = True, seed: int = 1
) -> Result:
    with RunFolder.create(path, {"algorithm": algorithm, "seed": seed}) as run:
        for number in (1, 2):
            for model in ("personal", "global"):
                run.metrics.append(number, model, "test", "accuracy", [accuracy, accuracy / 2], [0, 1])
                if validation:
                    run.metrics.append(number, model, "validation", "accuracy", [number, number], [0, 1])
            run.collaboration_weights.append(number, [[0.25, 0.75], [0.5, 0.5]], [0, 1])
            run.timings.append(number, train=1.0, evaluate=0.5)
        run.finish(summarise(run.metrics.read(), algorithm=algorithm, seed=seed, rounds=2, seconds=run.timings.total()))
    return Result(path)


def shown(what: Table) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def row(text: str, *words: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[: len(words)] == list(words))


def test_reads_a_finished_run(tmp_path: Path) -> None:
    result = finished(tmp_path / "run")
    assert result.finished and result.path == tmp_path / "run"
    assert result.config == {"algorithm": "fedacs", "seed": 1}
    assert len(result.metrics) == 2 * 2 * 2 * 2
    assert result.summary["personal"]["best"] == {"mean": 0.375, "round": 2}
    assert result.summary["seconds"] == {"total": 3.0, "per_round": 1.5}
    assert result.weight_rounds == [1, 2] and result.weights().loc[0, 1] == 0.75
    assert result.timings["evaluate"].tolist() == [0.5, 0.5]


def test_reading_needs_no_lock_and_leaves_no_trace(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with RunFolder.open(tmp_path / "run"):
        before[tmp_path / "run" / ".lock"] = (tmp_path / "run" / ".lock").stat().st_mtime_ns
        result = Result(tmp_path / "run")
        _ = result.metrics, result.summary, result.weights(1), result.timings, result._repr_html_()
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_an_unfinished_run_shows_what_it_has(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, {"seed": 1}) as run:
        run.metrics.append(1, "personal", "test", "accuracy", [0.5], [0])
        run.flush()
        result = Result(tmp_path)
        assert not result.finished and len(result.metrics) == 1 and result.weight_rounds == []
        assert "not finished" in repr(result) and "not finished" in result._repr_html_()
        with pytest.raises(RunFolderError, match=f"is not finished: `coterie resume {tmp_path}`"):
            _ = result.summary
        with pytest.raises(RunFolderError, match="holds no collaboration weights"):
            result.weights()


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run in"):
        Result(tmp_path / "nowhere")


def test_the_table_at_the_end_of_a_run(tmp_path: Path) -> None:
    text = shown(finished(tmp_path / "run", accuracy=0.8).table())
    assert "FedACS, test accuracy, 2 rounds, seed 1" in text
    # Clients .8 and .4: mean .6, standard deviation .2, worst .4; the best round on validation data is 2.
    assert row(text, "personal") == ["personal", "0.6000", "0.2000", "0.4000", "0.6000", "2", "3.0"]
    assert row(text, "global") == ["global", "0.6000", "0.2000", "0.4000", "0.6000", "2", "3.0"]
    assert "†" not in text


def test_a_best_round_chosen_on_test_data_says_so(tmp_path: Path) -> None:
    text = shown(finished(tmp_path / "run", accuracy=0.8, validation=False).table())
    assert row(text, "personal") == ["personal", "0.6000", "0.2000", "0.4000", "0.6000†", "1", "3.0"]
    assert "† chosen on test data" in text


def bold(what: Table) -> list[str]:
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    console.print(what)
    names = [segment.text for segment in console._record_buffer if segment.style and segment.style.bold]
    return [name.strip() for name in names if name.strip().replace(".", "").isdigit()]


def test_runs_beside_each_other(tmp_path: Path) -> None:
    results = [
        finished(tmp_path / "a", "fedacs", 0.8),
        finished(tmp_path / "b", "local", 0.4),
        finished(tmp_path / "c", "fedavg", 0.6, seed=2),
    ]
    compared = table([result.summary for result in results])
    text = shown(compared)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert row(text, "FedACS", "1", "personal")[3] == "0.6000"
    assert row(text, "Local", "1", "global")[3] == "0.3000"
    assert row(text, "FedAvg", "2", "global")[3] == "0.4500"
    assert "test accuracy, 2 rounds" in text and "seed 1" not in text
    assert bold(compared) == ["0.6000", "0.6000"]


def test_the_least_error_wins(tmp_path: Path) -> None:
    def of(error: float) -> dict[str, Any]:
        found = {"final": {"mean": error, "std": 0.0, "worst": error}, "best": None, "best_oracle": None}
        return {
            **{"algorithm": "x", "seed": 1, "rounds": 1, "metric": "rmse", "higher_is_better": False},
            **{"personal": found, "global": None, "seconds": {"total": 1.0, "per_round": 1.0}},
        }

    compared = table(
        [
            of(2.0),
            of(1.0),
            {**of(0.0), "personal": {**of(0)["personal"], "final": dict.fromkeys(("mean", "std", "worst"))}},
        ]
    )
    assert bold(compared) == ["1.0000"]
    assert "less is better" in shown(compared)


def test_shown_in_a_notebook(tmp_path: Path) -> None:
    page = finished(tmp_path / "run")._repr_html_()
    assert page.startswith("<table><caption>FedACS, test accuracy") and "personal" in page and "0.3750" in page


def test_accuracy_matrices_beside_each_other() -> None:
    def summary(name: str, fractions: dict[str, float], shared: float | None) -> dict[str, Any]:
        def at(mean: float) -> dict[str, float]:
            return {"mean": mean, "std": mean / 10}

        found = {"l_acc": at(0.9), "g_acc": at(0.3), "s_acc": {key: at(value) for key, value in fractions.items()}}
        found["global"] = None if shared is None else at(shared)
        return {"algorithm": name, "matrix": {"metric": "accuracy", "round": 7, **found}}

    runs = [summary("fedpg", {"1.0": 0.3, "0.25": 0.6}, 0.7), summary("local", {"0.25": 0.5}, None)]
    view = matrix_table([*runs, {"algorithm": "fedavg"}])
    assert view is not None
    lines = [line.split() for line in shown(view).splitlines() if line.split()[-1:] == ["7"]]
    assert [line[:4] for line in lines] == [
        ["FedPG", "L-acc", "0.9000", "0.0900"],
        ["Local", "L-acc", "0.9000", "0.0900"],
        ["FedPG", "S-acc(0.25)", "0.6000", "0.0600"],
        ["Local", "S-acc(0.25)", "0.5000", "0.0500"],
        ["FedPG", "S-acc(1)", "0.3000", "0.0300"],
        ["FedPG", "G-acc", "0.3000", "0.0300"],
        ["Local", "G-acc", "0.3000", "0.0300"],
        ["FedPG", "global", "0.7000", "0.0700"],
    ]
    assert matrix_table([{"algorithm": "fedavg"}]) is None
