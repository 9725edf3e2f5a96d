"""The page: one HTML file that holds everything it needs and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from coterie.results.figures import HeatMap, plotly_figure, theme
from coterie.results.report.elements import Markup, Plot, Section


def page(title: str, about: str, sections: Sequence[Section]) -> str:
    """Write the page.

    Scripts are admitted by their digest alone and nothing can be fetched, so that no text in a run, such as its name,
    can act.
    """
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), _asset("report.js")]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    contents = "\n".join(f'<li><a href="#{each.key}">{html.escape(each.title)}</a></li>' for each in sections)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{_asset('report.css')}</style>",
        "</head>",
        "<body>",
        "<header>",
        f"<div><h1>{html.escape(title)}</h1>\n<p>{html.escape(about)}</p></div>",
        '<button type="button" id="theme" aria-pressed="false">Dark colours</button>',
        "</header>",
        '<div class="columns">',
        f'<nav aria-label="Contents"><h2>Contents</h2><ol>\n{contents}\n</ol></nav>',
        "<main>",
        *(_section(each) for each in sections),
        "</main>",
        "</div>",
        _data("themes", {"light": theme(False), "dark": theme(True)}),
        *_figures(sections),
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts)


def _asset(name: str) -> str:
    return resources.files("coterie.results.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _section(section: Section) -> str:
    inside = "\n".join(part.text if isinstance(part, Markup) else _holder(part) for part in section.parts)
    heading = f'<h2 id="{section.key}-title">{html.escape(section.title)}</h2>'
    return f'<section id="{section.key}" aria-labelledby="{section.key}-title">\n{heading}\n{inside}\n</section>'


def _holder(plot: Plot) -> str:
    choice = ""
    if len(plot.variants) > 1:
        options = "".join(
            f'<option value="{number}">{html.escape(variant.label)}</option>'
            for number, variant in enumerate(plot.variants)
        )
        choice = f'<label class="choice">{plot.choice} <select data-of="{plot.key}">{options}</select></label>\n'
    notes = "".join(
        f'<p class="note" data-of="{plot.key}" data-variant="{number}"{" hidden" if number else ""}>'
        f"{html.escape(variant.chart.note)}</p>\n"
        for number, variant in enumerate(plot.variants)
        if isinstance(variant.chart, HeatMap) and variant.chart.note
    )
    square = " square" if any(isinstance(each.chart, HeatMap) and each.chart.square for each in plot.variants) else ""
    return (
        f"<figure>\n<h3>{html.escape(plot.title)}</h3>\n{choice}"
        f'<div class="plot{square}" id="plot-{plot.key}" data-key="{plot.key}" role="img" '
        f'aria-label="{html.escape(plot.title)}"></div>\n'
        f"<figcaption>{html.escape(plot.caption)}</figcaption>\n{notes}</figure>"
    )


def _figures(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        for part in section.parts:
            if isinstance(part, Plot):
                for number, variant in enumerate(part.variants):
                    yield _data(f"figure-{part.key}-{number}", _plain(variant))


def _plain(variant: Any) -> dict[str, Any]:
    """Give a figure as plain JSON types, without the template: the page has it once, for each ground."""
    figure: dict[str, Any] = json.loads(plotly_figure(variant.chart).to_json(validate=False, engine="json"))
    figure["layout"].pop("template", None)
    return figure


def _data(key: str, value: Any) -> str:
    """Write data for the page's script, in which no text can end the element that it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(sign, code)
    return f'<script type="application/json" id="{key}">{text}</script>'
