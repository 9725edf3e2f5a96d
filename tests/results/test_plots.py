"""Figures of result objects, as a notebook shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plotly.graph_objects import Figure

from coterie.errors import ConfigError, RunFolderError
from coterie.results import RunSet
from tests.results.report.folders import write_run


def test_a_run_plots_whatever_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", matrix=True)
    drawn = {
        "curves": run.plot_curves(),
        "loss": run.plot_curves("loss"),
        "clients": run.plot_clients(),
        "sorted": run.plot_clients(sort=True),
        "fairness": run.plot_fairness(),
        "weights": run.plot_weights(),
        "matrix": run.plot_matrix(),
        "s_acc": run.plot_s_acc(),
        "shares": run.plot_shares(),
        "bytes": run.plot_bytes(),
        "seconds": run.plot_seconds(),
    }
    assert all(isinstance(figure, Figure) and figure.data for figure in drawn.values())
    frame = run.metrics.query("model == 'personal' and split == 'test' and metric == 'accuracy'")
    means = frame.groupby("round")["value"].mean()
    np.testing.assert_allclose(drawn["curves"].data[0].y, means, rtol=1e-6)
    assert [frame.name for frame in drawn["weights"].frames] == ["1", "2", "3"]
    assert len(run.plot_weights(frames=2).frames) == 2
    np.testing.assert_allclose(drawn["s_acc"].data[0].y[0], np.diag(run.matrix()).mean(), rtol=1e-6)
    np.testing.assert_allclose(drawn["s_acc"].data[0].y[-1], run.matrix().to_numpy().mean(), rtol=1e-6)


def test_what_a_run_has_not_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "local", weights=False, shares=False, traffic=False)
    with pytest.raises(RunFolderError, match="holds no collaboration weights"):
        run.plot_weights()
    with pytest.raises(RunFolderError, match="holds no accuracy matrices"):
        run.plot_matrix()
    with pytest.raises(RunFolderError, match=r"has no shares\.parquet"):
        run.plot_shares()
    with pytest.raises(RunFolderError, match="has no bytes sent"):
        run.plot_bytes()
    with pytest.raises(RunFolderError, match="has no accuracy matrix"):
        run.plot_s_acc()
    with pytest.raises(RunFolderError, match="has no auroc"):
        run.plot_curves("auroc")
    with pytest.raises(RunFolderError, match="two fractions of attackers"):
        RunSet([run]).plot_robustness()
    with pytest.raises(ConfigError, match="at least one run"):
        RunSet([])


def test_attackers_are_in_no_figure_and_newcomers_only_in_their_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", attack="gaussian:0.34", models=("personal", "newcomer"))
    attackers = run.shares.loc[run.shares["role"] == "attacker", "client"].tolist()
    assert len(attackers) == 2
    own, newcomers = run.plot_clients().data
    assert set(own.customdata[:, 0]) == set(range(6)) - set(attackers)
    assert len(newcomers.y) == 6


def test_several_runs_share_a_figure(tmp_path: Path) -> None:
    runs = RunSet(
        [write_run(tmp_path / str(seed), seed=seed) for seed in (2, 1)] + [write_run(tmp_path / "x", "local")]
    )
    assert [line.name for line in runs.lines] == ["FedACS", "FedACS", "Local"]
    assert runs.firsts() == [1, 2]
    names = [trace.name for trace in runs.plot_curves().data if trace.name]
    assert names[:2] == ["FedACS", "Local"]
    assert runs.plot_seconds().data and runs.plot_bytes().data and runs.plot_fairness().data


def test_a_matrix_of_clients_that_nobody_knows_is_by_number(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", shares=False)
    labels = list(run.plot_weights().data[0].x)
    assert labels == [f"client {number}" for number in range(6)]


def test_plotting_packages_are_not_loaded_before_they_are_used() -> None:
    code = "import sys, coterie.cli.app, coterie.results.report; print({'plotly', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
