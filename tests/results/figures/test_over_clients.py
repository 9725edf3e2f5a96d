"""Clients beside each other: distributions, and how even they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from coterie.results import figures
from coterie.results.figures import Line

STYLES = figures.styles([Line("fedacs"), Line("local")])


def measured() -> pd.DataFrame:
    """Two seeds of one method, three clients; the last round is another for each, and an earlier one is in the way."""
    rows = []
    for run, last, scores, losses in (
        (0, 4, (0.6, 0.2, 1.0), (1.0, 2.0, 3.0)),
        (1, 2, (0.5, 0.5, 0.8), (1.0, 1.0, 4.0)),
    ):
        for number, metric, values in ((1, "accuracy", (0, 0, 0)), (last, "accuracy", scores), (last, "loss", losses)):
            for client, value in enumerate(values):
                rows.append(("fedacs", run, 100 + run, number, client, metric, float(value)))
    frame = pd.DataFrame(rows, columns=["line", "run", "seed", "round", "client", "metric", "value"])
    return frame.assign(model="personal", split="test")


def test_boxes_hold_every_client_of_the_last_round_of_each_run() -> None:
    chart = figures.distribution(measured(), "accuracy", STYLES)
    assert chart is not None
    ((title, (box,)),) = chart.panels
    assert (title, box.name) == ("personal model", "fedacs")
    np.testing.assert_allclose(box.values, [0.6, 0.2, 1.0, 0.5, 0.5, 0.8])
    np.testing.assert_array_equal(box.detail["client"], [0, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(box.detail["seed"], [100, 100, 100, 101, 101, 101])
    (trace,) = figures.plotly_figure(chart).data
    np.testing.assert_allclose(trace.y, box.values, rtol=1e-6)
    assert "client %{customdata[0]}" in trace.hovertemplate


def test_sorted_clients_rise_and_keep_their_numbers() -> None:
    chart = figures.sorted_clients(measured(), "accuracy", STYLES)
    assert chart is not None
    (series,) = chart.panels[0].series
    np.testing.assert_allclose(series.y, [0.2, 0.5, 0.5, 0.6, 0.8, 1.0])
    np.testing.assert_array_equal(series.detail["client"], [1, 0, 1, 0, 2, 2])
    np.testing.assert_allclose(series.x, 100 * (np.arange(6) + 0.5) / 6)


def test_variances_are_over_clients() -> None:
    found = figures.evenness(measured(), "accuracy").set_index("run")
    # .6, .2, 1.0: mean .6, squares .16 + .16 over 3. Losses 1, 2, 3: 2 / 3. And .5, .5, .8: .1² + .1² + .2² over 3.
    assert found.loc[0, "mean"] == pytest.approx(0.6)
    assert found.loc[0, "variance"] == pytest.approx(0.32 / 3)
    assert found.loc[0, "loss_variance"] == pytest.approx(2 / 3)
    assert found.loc[1, "variance"] == pytest.approx(0.06 / 3)
    assert found.loc[1, "loss_variance"] == pytest.approx(2.0)


def test_a_point_for_each_run_and_a_larger_one_for_their_mean() -> None:
    chart = figures.fairness(measured(), "accuracy", STYLES)
    assert chart is not None
    assert [panel.title for panel in chart.panels] == ["variance of test accuracy", "variance of test loss"]
    runs, mean = chart.panels[0].series
    np.testing.assert_allclose(runs.x, [0.32 / 3, 0.06 / 3])
    np.testing.assert_allclose(runs.y, [0.6, 0.6])
    assert runs.faint and not mean.faint
    np.testing.assert_allclose(mean.x, [0.19 / 3])
    legend = [trace.showlegend for trace in figures.plotly_figure(chart).data]
    assert legend == [False, True, False, False]  # one entry, and that of the marker in front


def test_without_losses_there_is_one_variance() -> None:
    frame = measured()
    chart = figures.fairness(frame[frame["metric"] != "loss"], "accuracy", STYLES)
    assert chart is not None and len(chart.panels) == 1
    assert figures.fairness(frame, "auroc", STYLES) is None
    assert (
        figures.distribution(frame, "auroc", STYLES) is None and figures.sorted_clients(frame, "auroc", STYLES) is None
    )


def test_many_values_of_a_box_are_not_drawn_one_by_one() -> None:
    one = measured().iloc[:1]
    frame = pd.concat([one.assign(client=client, value=client / 1000) for client in range(1000)])
    chart = figures.distribution(frame, "accuracy", STYLES)
    assert chart is not None
    (trace,) = figures.plotly_figure(chart).data
    assert len(trace.y) == 1000 and trace.boxpoints == "outliers"
