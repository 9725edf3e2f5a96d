"""What the site shows of a run: the guide's own commands, played while the site is built, drawn by the library.

``docs/hospitals.md`` is read for its commands, so that pictures and report are what its reader gets.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.results import Result, gains
from coterie.results.figures import Chart, Panels, gains_by_client, matplotlib_figure
from coterie.results.report.elements import Plot
from coterie.results.report.sections import sections
from coterie.results.report.sources import read_runs

GUIDE = Path(__file__).resolve().parents[1] / "hospitals.md"
PLACE = "sample"
_PLAYED = ("coterie data", "coterie compare", "coterie report")
INK, _GRID = {False: "#24292f", True: "#d0d7de"}, {False: "#e2e5e9", True: "#3d444d"}


@dataclass(frozen=True)
class Picture:
    """A figure of the gallery: the plot's name in the report, which of its charts, and what it shows."""

    plot: str
    variant: str
    title: str
    words: str
    wide: bool = True

    @property
    def stem(self) -> str:
        return re.sub(r"\W+", "-", f"{self.plot} {self.variant}".strip().lower())


GALLERY = (
    Picture("curves-accuracy", "", "Over rounds", "a metric of each model, with bands over seeds"),
    Picture(
        "who-gains-local", "FedACS", "Client by client", "who gains or loses by a method, beyond chance or not", False
    ),
    Picture(
        "weights", "", "Who listens to whom", "collaboration weights, with a slider over rounds in the report", False
    ),
    Picture("sorted-accuracy", "", "Every client", "from the worst served to the best, by each method"),
    Picture("reliability", "", "Calibration", "whether a probability of 80% is right in 80 of 100 cases"),
    Picture("shares", "", "Who holds what", "samples of each class at each client"),
)


@functools.cache
def made() -> dict[str, Path]:
    """Play the guide's commands, and give the files for the site by their places on it."""
    folder = Path(tempfile.mkdtemp(prefix="coterie-site-"))
    with contextlib.chdir(folder):
        for command in _commands():
            done = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
            assert done.exit_code == 0, f"{command}: {done.output}"
        report = Path("report.html")
        # Where the site was built is nobody's business.
        report.write_text(report.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")
        found = {f"{PLACE}/report.html": folder / "report.html"}
        for stem, chart in _charts():
            for dark in (False, True):
                path = folder / _file(stem, dark)
                _draw(chart, path, dark)
                found[f"{PLACE}/{path.name}"] = path
    return found


def _commands() -> Iterator[str]:
    for block in re.findall(r"^<!-- run -->\n```bash\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(_PLAYED):
                yield line


def _charts() -> Iterator[tuple[str, Chart]]:
    plots = {
        part.key: {variant.label: variant.chart for variant in part.variants}
        for section in sections(read_runs([Path("readmission")], lambda path: None))
        for part in section.parts
        if isinstance(part, Plot)
    }
    for picture in GALLERY:
        charts = plots[picture.plot]
        yield picture.stem, charts[picture.variant] if picture.variant else next(iter(charts.values()))
    alone, one, alike = (Result(Path("readmission/runs") / f"{name}-seed1") for name in ("local", "fedavg", "fedacs"))
    what = "gain in test accuracy over training alone"
    panels = []
    for title, found in (
        ("one model for all (FedAvg)", gains(one, alone, model="global")),
        ("listening to those alike (FedACS)", gains(alike, alone)),
    ):
        panels.append(replace(gains_by_client(found.clients, what).panels[0], title=title))
    values = [value for panel in panels for series in panel.series for value in series.x.tolist()]
    both = (min(values) - 0.03, max(values) + 0.03)  # one scale, so that the two can be compared
    panels = [replace(panel, x=replace(panel.x, range=both)) for panel in panels]
    yield "who-gains", Panels(tuple(panels), share_y=False, height=1.15)


def _file(stem: str, dark: bool) -> str:
    return f"{stem}{'-dark' if dark else ''}.svg"


def set_in_ink(dark: bool) -> dict[Any, Any]:
    """Give Matplotlib's settings for a picture on light or dark ground."""
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    ground = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"}
    return dict.fromkeys(names, INK[dark]) | ground


def _draw(chart: Chart, path: Path, dark: bool) -> None:
    with matplotlib.rc_context(set_in_ink(dark)):
        figure = matplotlib_figure(chart)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "coterie"}):
            figure.savefig(path, metadata={"Date": None})
    path.write_text(path.read_text(encoding="utf-8").replace(_GRID[False], _GRID[dark]), encoding="utf-8")


def _both(stem: str, words: str) -> str:
    return "".join(
        f"![{words}]({PLACE}/{_file(stem, dark)}#only-{'dark' if dark else 'light'})" for dark in (False, True)
    )


def who_gains() -> str:
    """Show what each hospital gains by two methods, and point to the report."""
    words = "What each hospital gains over training alone: by one model for all, and by listening to those alike"
    return (
        f"{_both('who-gains', words)}\n\n"
        f"[Click through the whole report]({PLACE}/report.html){{ .md-button .md-button--primary target=_blank }}\n"
    )


def gallery() -> str:
    """Show what the library draws, in a grid."""
    cards = (
        f'<figure markdown="span"{" class=wide" if each.wide else ""}>\n{_both(each.stem, each.title)}\n'
        f"<figcaption><strong>{each.title}</strong>: {each.words}</figcaption>\n</figure>"
        for each in GALLERY
    )
    return '<div class="gallery" markdown>\n\n' + "\n\n".join(cards) + "\n\n</div>\n"
