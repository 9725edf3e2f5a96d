"""Heat maps: clients in the order of their groups, rounds as they were recorded, blocks that keep the mean."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from coterie import randomness
from coterie.results import figures
from coterie.results.figures import ClientOrder, HeatMap, Panels

SHARES = pd.DataFrame(
    {
        "client": [0, 1, 2, 3],
        "role": "honest",
        "train": [4, 5, 6, 7],
        "group": [1, 0, 1, 0],
        "class cat": [0, 5, 1, 0],
        "class dog": [4, 0, 5, 7],
    }
)
KEYS = {"what": "weight", "axes": ("taker", "giver")}


def matrix(clients: int, purpose: str = "test figures") -> pd.DataFrame:
    return pd.DataFrame(randomness.stream(5, purpose).random((clients, clients)))


def plain(clients: int) -> ClientOrder:
    return ClientOrder(np.arange(clients), (), "number")


def test_clients_stand_by_group_then_number() -> None:
    order = figures.order_by_group(SHARES)
    np.testing.assert_array_equal(order.clients, [1, 3, 0, 2])
    assert order.groups == ("group 0", "group 0", "group 1", "group 1") and order.by == "group"


def test_without_groups_by_main_class_and_without_classes_by_number() -> None:
    order = figures.order_by_group(SHARES.drop(columns="group"))
    np.testing.assert_array_equal(order.clients, [1, 0, 2, 3])
    assert order.groups == ("mostly cat", "mostly dog", "mostly dog", "mostly dog") and order.by == "main class"
    order = figures.order_by_group(SHARES[["client", "role", "train"]].iloc[::-1])
    np.testing.assert_array_equal(order.clients, [0, 1, 2, 3])
    assert order.groups == () and order.by == "number"
    np.testing.assert_array_equal(figures.order_by_group(None, {7, 2}).clients, [2, 7])
    np.testing.assert_array_equal(figures.order_by_group(SHARES, [0, 1]).clients, [1, 0])


def test_ten_groups_are_in_the_order_of_numbers_and_not_of_letters() -> None:
    shares = pd.DataFrame({"client": [0, 1, 2], "group": [10, 9, 2]})
    np.testing.assert_array_equal(figures.order_by_group(shares).clients, [2, 1, 0])


def test_rows_and_columns_are_those_of_the_order() -> None:
    weights = matrix(4)
    order = figures.order_by_group(SHARES)
    chart = figures.heat_map([(1, weights)], order, **KEYS)
    np.testing.assert_allclose(chart.frames[0][1], weights.to_numpy()[[1, 3, 0, 2]][:, [1, 3, 0, 2]], rtol=1e-6)
    assert chart.rows.labels == ("client 1 (group 0)", "client 3 (group 0)", "client 0 (group 1)", "client 2 (group 1)")
    assert chart.rows.ticks == ((0.5, "group 0"), (2.5, "group 1")) and chart.rows.borders == (1.5,)
    assert chart.rows.title == "taker, by group"


def test_the_sliders_frames_are_the_recorded_matrices() -> None:
    recorded = [(number, matrix(3, f"round {number}")) for number in (1, 5, 9)]
    figure = figures.plotly_figure(figures.heat_map(recorded, plain(3), **KEYS))
    assert [frame.name for frame in figure.frames] == ["1", "5", "9"]
    for (_, weights), frame in zip(recorded, figure.frames, strict=True):
        np.testing.assert_array_equal(frame.data[0].z, weights.to_numpy().astype(np.float32))
    np.testing.assert_array_equal(figure.data[0].z, figure.frames[-1].data[0].z)
    steps = figure.layout.sliders[0].steps
    assert [step.label for step in steps] == ["1", "5", "9"] and [step.args[0][0] for step in steps] == ["1", "5", "9"]
    assert figure.layout.sliders[0].active == 2
    alone = figures.plotly_figure(figures.heat_map(recorded[:1], plain(3), **KEYS))
    assert not alone.frames and not alone.layout.sliders


def test_clients_that_took_no_part_are_left_blank() -> None:
    weights = pd.DataFrame([[0.5, 0.5]], index=[2], columns=[0, 2])
    ((_, values),) = figures.heat_map([(1, weights)], plain(3), **KEYS).frames
    np.testing.assert_array_equal(np.isnan(values), [[True, True, True], [True, True, True], [False, True, False]])


@pytest.mark.parametrize(("clients", "limit"), [(1000, 100), (17, 5), (6, 3), (5, 4)])
def test_blocks_keep_the_mean(clients: int, limit: int) -> None:
    values = matrix(clients)
    chart = figures.heat_map([(1, values)], plain(clients), limit=limit, **KEYS)
    ((_, small),) = chart.frames
    width = -(-clients // limit)
    sizes = np.diff([*range(0, clients, width), clients])
    assert small.shape == (len(sizes), len(sizes)) and max(small.shape) <= limit
    weighted = (small * np.outer(sizes, sizes)).sum() / clients**2
    assert weighted == pytest.approx(values.to_numpy().mean(), rel=1e-6)
    assert small[0, -1] == pytest.approx(values.to_numpy()[: sizes[0], -sizes[-1] :].mean(), rel=1e-6)
    assert f"{clients} clients are put together in {len(sizes)} blocks" in chart.note
    assert chart.rows.labels[0].startswith(f"{width} clients: 0, 1")


def test_a_block_of_nothing_is_blank() -> None:
    values = np.array([[np.nan, np.nan, 1.0], [np.nan, np.nan, 3.0], [2.0, np.nan, 4.0]])
    here = np.array([0, 2])
    np.testing.assert_array_equal(figures.blocks(values, here, here), [[np.nan, 2.0], [2.0, 4.0]])


def test_a_clients_weight_on_itself_decides_no_colour() -> None:
    weights = pd.DataFrame([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.0, 0.3, 0.7]])
    chart = figures.heat_map([(1, weights)], plain(3), own=False, **KEYS)
    assert chart.range == pytest.approx((0.0, 0.3))
    assert chart.frames[0][1][0, 0] == pytest.approx(0.9)  # shown all the same
    assert figures.heat_map([(1, weights)], plain(3), **KEYS).range == pytest.approx((0.0, 0.9))
    small = figures.heat_map([(1, weights)], plain(3), own=False, limit=2, **KEYS)
    assert small.frames[0][1][0, 0] == pytest.approx(0.15)  # of .1 and .2 alone
    assert "What a client has with itself is left out" in small.note


def test_borders_of_groups_lie_where_they_do_among_blocks() -> None:
    order = ClientOrder(np.arange(10), ("a",) * 4 + ("b",) * 6, "group")
    chart = figures.heat_map([(1, matrix(10))], order, limit=5, **KEYS)
    # Blocks of two clients: four clients are two blocks, which end at 1.5.
    assert chart.rows.borders == (1.5,) and chart.rows.ticks == ((0.5, "a"), (3.0, "b"))
    assert chart.rows.labels[2] == "2 clients: 4, 5 (b)"


def test_who_has_what_as_bubbles() -> None:
    chart = figures.samples_by_client(SHARES, figures.order_by_group(SHARES))
    assert isinstance(chart, Panels)
    (series,) = chart.panels[0].series
    # In order 1, 3, 0, 2: client 1 has 5 cats, 3 has 7 dogs, 0 has 4 dogs, 2 has a cat and 5 dogs.
    np.testing.assert_array_equal(series.x, [0, 1, 2, 3, 3])
    np.testing.assert_array_equal(series.y, [0, 1, 1, 0, 1])
    np.testing.assert_array_equal(series.detail["training samples"], [5, 7, 4, 1, 5])
    assert series.size is not None
    np.testing.assert_allclose(series.size, np.array([5, 7, 4, 1, 5]) / 7)
    (trace,) = figures.plotly_figure(chart).data
    assert list(trace.customdata[0]) == ["client 1 (group 0)", "cat", 5]


def test_who_has_what_of_many_clients_as_a_heat_map() -> None:
    clients = 300
    counts = randomness.stream(5, "counts").integers(0, 9, (clients, 3))
    shares = pd.DataFrame({"client": np.arange(clients), "group": 0} | {f"class {k}": counts[:, k] for k in range(3)})
    chart = figures.samples_by_client(shares, figures.order_by_group(shares))
    assert isinstance(chart, HeatMap) and not chart.square
    ((_, values),) = chart.frames
    np.testing.assert_allclose(values, counts.T.reshape(3, 100, 3).mean(2), rtol=1e-6)
    assert "300 clients are put together in 100 blocks" in chart.note


def test_who_has_how_much_where_there_are_no_classes() -> None:
    chart = figures.samples_by_client(SHARES[["client", "role", "train"]], plain(4))
    assert isinstance(chart, Panels)
    np.testing.assert_array_equal(chart.panels[0].series[0].y, [4, 5, 6, 7])


def test_events_stand_by_client_and_round() -> None:
    events = pd.DataFrame(
        [(0, None, "began", ""), (2, 7, "no reply", "late"), (3, 1, "no reply", "late")],
        columns=["round", "client", "what", "reason"],
    )
    (panel,) = figures.events(events).panels
    began, lost = panel.series
    np.testing.assert_array_equal(lost.x, [2, 3])
    np.testing.assert_array_equal(lost.y, [2, 1])
    np.testing.assert_array_equal(began.y, [0])
    assert panel.y.ticks == ((0.0, "federation"), (1.0, "client 1"), (2.0, "client 7"))
    assert list(lost.detail["whose"]) == ["client 7", "client 1"]
