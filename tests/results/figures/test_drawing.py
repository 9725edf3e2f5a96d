"""Charts drawn by Plotly and by matplotlib: sizes, text as text, and whatever people write left as it is."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from coterie.errors import ConfigError
from coterie.results import figures
from coterie.results.figures import Axis, Box, Boxes, Chart, ClientOrder, Line, Panel, Panels, Series, Style
from coterie.results.figures.matplotlib_figures import COLUMN, WIDE

ONE, TWO = np.array([1.0, 2.0]), np.array([0.5, 0.25])
LINES = Panels(
    (
        Panel(
            (Series("a$b$", Style(), ONE, TWO, spread=TWO / 4), Series("c_d", Style(dash="dot"), ONE, TWO)),
            Axis("round", whole=True),
            Axis("accuracy"),
        ),
    )
)
POINTS = Panels((Panel((Series("a", Style(), ONE, TWO, points=True, size=TWO),)), Panel(())), share_y=False)
BOXES = Boxes(
    (("one", (Box("a", Style(), TWO), Box("b", Style(), TWO))), ("two", (Box("a", Style(), TWO),))), Axis("y")
)
MAP = figures.heat_map(
    [(number, pd.DataFrame(np.eye(3) * number)) for number in (1, 2)],
    ClientOrder(np.arange(3), ("x", "x", "y"), "group"),
    what="weight",
    axes=("taker", "giver"),
)
CHARTS: dict[str, Chart] = {"lines": LINES, "points": POINTS, "boxes": BOXES, "map": MAP}


@pytest.mark.parametrize("name", CHARTS)
def test_files_for_papers(name: str, tmp_path: Path) -> None:
    svg, png = figures.save(CHARTS[name], tmp_path / "a.figure")
    assert (svg.name, png.name) == ("a.figure.svg", "a.figure.png")
    width = WIDE if name in ("points", "boxes") else COLUMN
    with Image.open(png) as image:
        assert image.width == pytest.approx(300 * width, abs=1)
    text = svg.read_text(encoding="utf-8")
    assert float(re.search(r'width="([\d.]+)pt"', text)[1]) == pytest.approx(72 * width)  # type: ignore[index]
    assert "<text" in text
    again = figures.save(CHARTS[name], tmp_path / "again")[0]
    assert again.read_bytes() == svg.read_bytes()


def test_a_dollar_is_a_dollar(tmp_path: Path) -> None:
    text = figures.save(LINES, tmp_path / "lines")[0].read_text(encoding="utf-8")
    assert ">a$b$</text>" in text and ">c_d</text>" in text


def test_of_several_rounds_paper_shows_the_last() -> None:
    (image,) = figures.matplotlib_figure(MAP).axes[0].images
    np.testing.assert_array_equal(image.get_array(), np.eye(3) * 2)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"install coterie\[plots\]"):
        figures.save(LINES, tmp_path / "lines")
    assert figures.plotly_figure(LINES).data


def test_what_people_write_is_not_read_as_html() -> None:
    evil = "<b>x</b><a href='javascript:alert(1)'>%{y}</a>"
    style = figures.styles([Line(evil)])[evil]
    series = Series(evil, style, ONE, TWO, detail={"why": [evil, evil]}, points=True)
    figure = figures.plotly_figure(Panels((Panel((series,), title=evil), Panel((), Axis(evil, ((1.0, evil),))))))
    said = figure.to_json()
    assert figure.data[0].name == figures.literal(evil) == evil.replace("<", "&lt;").replace(">", "&gt;")
    assert evil not in figure.data[0].hovertemplate and "javascript" not in figure.data[0].hovertemplate
    assert "<b>" not in said and "\\u003cb\\u003e" not in said


def test_both_grounds_have_every_colour() -> None:
    light, dark = (figures.theme(is_dark)["layout"] for is_dark in (False, True))
    assert light.keys() == dark.keys()
    for path in (("font", "color"), ("xaxis", "gridcolor"), ("hoverlabel", "bgcolor"), ("modebar", "color")):
        assert light[path[0]][path[1]] != dark[path[0]][path[1]]
