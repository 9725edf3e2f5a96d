"""Curves with bands: every number against the mean and the deviation worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from coterie.results import figures
from coterie.results.figures import Line, Panels, Style

STYLES = figures.styles([Line("fedacs"), Line("local")])


def metrics(*rows: tuple[str, int, int, int, float], model: str = "personal", metric: str = "accuracy") -> pd.DataFrame:
    """Rows of (line, run, round, client, value)."""
    frame = pd.DataFrame(rows, columns=["line", "run", "round", "client", "value"])
    return frame.assign(seed=frame["run"] + 10, model=model, split="test", metric=metric)


# Two seeds of one method with two clients each, and one of another.
TWO = metrics(
    ("fedacs", 0, 1, 0, 0.2),
    ("fedacs", 0, 1, 1, 0.4),
    ("fedacs", 0, 2, 0, 0.6),
    ("fedacs", 0, 2, 1, 0.8),
    ("fedacs", 1, 1, 0, 0.5),
    ("fedacs", 1, 1, 1, 0.7),
    ("fedacs", 1, 2, 0, 0.7),
    ("fedacs", 1, 2, 1, 0.9),
    ("local", 2, 1, 0, 0.1),
    ("local", 2, 2, 0, 0.3),
)


def only(chart: Panels | None, panel: int = 0) -> dict[str, figures.Series]:
    assert chart is not None
    return {series.name: series for series in chart.panels[panel].series}


def test_a_curve_is_the_mean_over_clients_and_then_over_seeds() -> None:
    drawn = only(figures.curves(TWO, "accuracy", STYLES))
    assert list(drawn) == ["fedacs", "local"]
    fedacs = drawn["fedacs"]
    # Means over clients .3, .7 and .6, .8; over seeds .45, .75. Deviation of two numbers a, b: |a - b| / sqrt(2).
    np.testing.assert_array_equal(fedacs.x, [1, 2])
    np.testing.assert_allclose(fedacs.y, [0.45, 0.75])
    assert fedacs.spread is not None
    np.testing.assert_allclose(fedacs.spread, [0.3 / math.sqrt(2), 0.1 / math.sqrt(2)])
    np.testing.assert_array_equal(fedacs.detail["seeds"], [2, 2])
    assert drawn["local"].spread is None and drawn["local"].detail == {}
    np.testing.assert_allclose(drawn["local"].y, [0.1, 0.3])


def test_seeds_count_alike_however_many_clients_they_have() -> None:
    frame = metrics(
        ("fedacs", 0, 1, 0, 0.0), ("fedacs", 1, 1, 0, 1.0), ("fedacs", 1, 1, 1, 1.0), ("fedacs", 1, 1, 2, 1.0)
    )
    assert only(figures.curves(frame, "accuracy", STYLES))["fedacs"].y == pytest.approx([0.5])


def test_what_one_run_has_not_reached_is_the_others_alone() -> None:
    """A run that is not finished ends its line's band, not the line."""
    frame = metrics(("fedacs", 0, 1, 0, 0.2), ("fedacs", 1, 1, 0, 0.4), ("fedacs", 1, 2, 0, 0.6))
    drawn = only(figures.curves(frame, "accuracy", STYLES))["fedacs"]
    np.testing.assert_allclose(drawn.y, [0.3, 0.6])
    assert drawn.spread is not None and np.isnan(drawn.spread[1])
    np.testing.assert_array_equal(drawn.detail["seeds"], [2, 1])
    shade, line = figures.plotly_figure(Panels((figures.Panel((drawn,)),))).data
    np.testing.assert_array_equal(shade.x, [1, 1])
    np.testing.assert_array_equal(line.x, [1, 2])


def test_a_loss_that_is_nan_is_not_hidden_but_an_undefined_score_is_left_out() -> None:
    rows = (("local", 0, 1, 0, 0.5), ("local", 0, 1, 1, math.nan))
    assert np.isnan(only(figures.curves(metrics(*rows, metric="loss"), "loss", STYLES))["local"].y[0])
    assert only(figures.curves(metrics(*rows), "accuracy", STYLES))["local"].y[0] == 0.5


def test_a_panel_for_each_model_in_their_order_without_what_was_chosen_on_test_data() -> None:
    row = ("local", 0, 1, 0, 0.5)
    frame = pd.concat(
        [metrics(row, model=model) for model in ("hybrid_oracle", "cloud", "hybrid", "global", "personal")]
    )
    chart = figures.curves(frame, "accuracy", STYLES)
    assert chart is not None
    assert [panel.title for panel in chart.panels] == ["personal model", "global model", "hybrid model", "cloud model"]
    assert figures.curves(frame, "auroc", STYLES) is None


def test_the_plotly_figure_holds_the_same_numbers() -> None:
    chart = figures.curves(TWO, "accuracy", STYLES)
    assert chart is not None
    shade, fedacs, local = figures.plotly_figure(chart).data
    np.testing.assert_allclose(fedacs.y, [0.45, 0.75], rtol=1e-6)
    band = np.array([0.3, 0.1]) / math.sqrt(2)
    middle = np.array([0.45, 0.75])
    np.testing.assert_allclose(shade.y[:2], middle + band, rtol=1e-6)
    np.testing.assert_allclose(shade.y[:1:-1], middle - band, rtol=1e-6)
    np.testing.assert_allclose(fedacs.customdata[:, 0], band, rtol=1e-6)
    assert (fedacs.name, fedacs.line.color) == ("fedacs", STYLES["fedacs"].colour)
    assert not shade.showlegend and fedacs.showlegend and local.showlegend


def test_bytes_have_the_unit_that_suits_them() -> None:
    rows = [("local", 0, number, -1, 3_000_000.0 * number) for number in (1, 2)]
    up = metrics(*rows, model="federation", metric="bytes_up").assign(split="wire")
    down = metrics(*rows, model="federation", metric="bytes_down").assign(split="wire", value=0.0)
    chart = figures.traffic(pd.concat([up, down]), STYLES)
    assert chart is not None and chart.panels[0].y.title == "MB in a round"
    np.testing.assert_allclose(only(chart)["local"].y, [3.0, 6.0])
    np.testing.assert_allclose(only(chart, 1)["local"].y, [0.0, 0.0])
    assert figures.traffic(down, STYLES) is None


def test_seconds_have_a_panel_for_each_thing_that_took_time() -> None:
    timings = pd.DataFrame({"line": "local", "run": [0, 1], "seed": 0, "round": 1, "training": [1.0, 3.0], "idle": 0.0})
    chart = figures.seconds(timings, STYLES)
    assert chart is not None and [panel.title for panel in chart.panels] == ["training"]
    assert only(chart)["local"].y == pytest.approx([2.0])


def test_s_acc_goes_from_l_acc_to_g_acc() -> None:
    matrix = pd.DataFrame([[1.0, 0.0, 0.5], [0.25, 0.5, 0.0], [0.0, 0.0, 0.75]])
    found = figures.s_acc_by_fraction(matrix, seed=3, counted=[0, 1])
    # L-acc of clients 0 and 1 is 1 and .5; G-acc is 1.5 / 3 and .75 / 3. Client 2 does not count.
    assert found["value"].iloc[0] == pytest.approx(0.75)
    assert found["value"].iloc[-1] == pytest.approx(0.375)
    chart = figures.s_acc_chart(found.assign(line="local", run=0), "accuracy", STYLES)
    np.testing.assert_allclose(only(chart)["local"].x, np.arange(11) / 10)


def test_runs_without_attackers_begin_the_line_of_every_attack() -> None:
    rows = [("", 0.0, 0.9), ("gaussian", 0.2, 0.6), ("gaussian", 0.4, 0.3), ("sign_flip", 0.2, 0.5)]
    found = pd.DataFrame(rows, columns=["kind", "fraction", "value"]).assign(
        model="personal", line="local", run=[0, 1, 2, 3]
    )
    chart = figures.robustness(found, "accuracy", STYLES)
    assert [panel.title for panel in chart.panels] == ["gaussian, personal model", "sign_flip, personal model"]
    np.testing.assert_allclose(only(chart)["local"].x, [0.0, 0.2, 0.4])
    np.testing.assert_allclose(only(chart)["local"].y, [0.9, 0.6, 0.3])
    np.testing.assert_allclose(only(chart, 1)["local"].y, [0.9, 0.5])


def test_methods_have_colours_and_settings_have_kinds_of_lines() -> None:
    lines = [Line(method, setting) for setting in ("a", "b") for method in ("x", "y")]
    found = figures.styles(lines)
    assert found["x, a"].colour == found["x, b"].colour != found["y, a"].colour
    assert found["x, a"].dash == found["y, a"].dash != found["x, b"].dash
    many = figures.styles([Line(str(number)) for number in range(20)])
    assert len({(style.colour, style.dash) for style in many.values()}) == 20
    assert Style("#0072B2").pale(0.5) == "rgba(0,114,178,0.5)"
