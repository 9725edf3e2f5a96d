"""The documentation as it is built: no warning, no dead link, nothing from a network, every public name in it."""

from __future__ import annotations

import fcntl
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import pytest
import typer
from selenium.webdriver.remote.webdriver import WebDriver

import coterie
from coterie import data, models
from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from coterie.cli.app import app
from coterie.config import ExperimentConfig
from coterie.data import partitions
from coterie.evaluation import METRICS
from coterie.federation.schema_table import lines
from coterie.simulation import attacks

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).resolve().parents[2]
LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("use", "href")}
"""What a browser fetches by itself, beside what style sheets name."""


@dataclass
class Written(HTMLParser):
    """A page of the site: its anchors, its links, and what its article holds."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    inside: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside += tag == "article"
        if self.inside:
            self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.links.append((tag, name, value))

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag == "article"

    def handle_data(self, text: str) -> None:
        if self.inside:
            self.text.append(text)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, built once however many processes the tests run in."""
    shared = os.environ.get("PYTEST_XDIST_WORKER") is not None
    base = tmp_path_factory.getbasetemp().parent if shared else tmp_path_factory.mktemp("site")
    folder = base / "site"
    with (base / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "index.html").exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                cwd=ROOT,
                env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Written]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = Written()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def article(page: Written) -> str:
    return " ".join(" ".join(page.text).split())


def bare(text: str) -> str:
    """A text without what HTML and Markdown do to it: blanks, and marks of code."""
    return re.sub(r"[\s`]", "", text)


def test_every_link_and_anchor_is_there(site: Path, pages: dict[Path, Written]) -> None:
    looked_at = 0
    for path, page in pages.items():
        for _, _, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith(("data:", "mailto:")):
                continue
            if path.name == "404.html":
                continue  # it is shown at any address, so its links begin at the root of the site's own host
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_relative_to(site), f"{path.name}: {link} leaves the site"
            assert target.is_file(), f"{path.name}: {link}"
            if parts.fragment and target in pages and parts.fragment != "__toc":
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"
            looked_at += 1
    assert looked_at > 500


def test_nothing_is_fetched_from_another_host(site: Path, pages: dict[Path, Written]) -> None:
    for path, page in pages.items():
        for tag, name, link in page.links:
            if (tag, name) in LOADS:
                assert not urlsplit(link).netloc, f"{path.name}: <{tag} {name}={link!r}>"
    for path in site.rglob("*.css"):
        for link in re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", path.read_text(encoding="utf-8")):
            assert not urlsplit(link).netloc or link.startswith("data:"), f"{path.name}: {link}"
    for path in site.rglob("*.svg"):
        assert not re.search(r"(?:href|src)=\"https?://", path.read_text(encoding="utf-8")), path.name


def test_a_link_to_another_host_would_be_found() -> None:
    page = Written()
    page.feed('<head><script src="https://example.org/a.js"></script></head><article><p id="x">text</p></article>')
    assert page.links == [("script", "src", "https://example.org/a.js")] and urlsplit(page.links[0][2]).netloc
    assert page.anchors == {"x"} and article(page) == "text" and page.counts["p"] == 1


def sources() -> list[Path]:
    return sorted((ROOT / "docs").rglob("*.md"))


def test_every_page_is_in_the_navigation_and_says_something(site: Path, pages: dict[Path, Written]) -> None:
    front = pages[site / "index.html"]
    linked = {(site / link).resolve() for tag, _, link in front.links if tag == "a" and not urlsplit(link).netloc}
    for source in sources():
        built = site / source.relative_to(ROOT / "docs").with_suffix(".html")
        assert built in pages and (built in linked or source.name == "index.md"), source
        assert len(article(pages[built])) > 300, source
    assert {site / "changelog.html", site / "notes.html"} <= linked


@pytest.mark.parametrize(
    "source", [path for path in sources() if path.parent.name == "docs"], ids=lambda path: path.stem
)
def test_lists_and_tables_are_lists_and_tables(source: Path, site: Path, pages: dict[Path, Written]) -> None:
    """Python-Markdown wants blank lines and indents that other readers of Markdown do not."""
    prose = re.sub(r"^ *```.*?^ *```$", "", source.read_text(encoding="utf-8"), flags=re.M | re.S)
    counts = pages[site / source.relative_to(ROOT / "docs").with_suffix(".html")].counts
    items = re.findall(r"^ *(?:[-*]|\d+\.) ", prose, re.M)
    assert counts.get("li", 0) == len(items), "list items"
    assert counts.get("ol", 0) == len(re.findall(r"^ *1\. ", prose, re.M)), "a numbered list that breaks off"
    # Blocks of code with line numbers or titles are divisions, so every table is one of the page's own.
    generated = len(re.findall(r"^<!-- generated: (?!who_gains|gallery|leaderboard_picture)\w+ -->$", prose, re.M))
    assert counts.get("table", 0) == len(re.findall(r"^\|[-| :]+\|$", prose, re.M)) + generated, "tables"


def test_marks_for_the_tests_are_not_shown(pages: dict[Path, Written]) -> None:
    for path, page in pages.items():
        assert "<!--" not in article(page), path.name
        assert not re.search(r":(?:class|func|meth|attr|data|mod):`", article(page)), path.name


# ------------------------------------------------------------------------------------------------ as a browser shows it


def wait_for(browser: WebDriver, script: str, seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while not (found := browser.execute_script(script)):
        assert time.monotonic() < until, f"{script}: {browser.get_log('browser')}"
        time.sleep(0.1)
    return found


def test_the_search_works_where_the_site_is_opened_as_files(site: Path, browser: WebDriver) -> None:
    for page in ("index.html", "reference/python.html"):  # from both depths the index is found
        browser.get((site / page).as_uri())
        browser.get_log("browser")
        browser.execute_script(
            "document.getElementById('__search').click();"
            "const query = document.querySelector('[data-md-component=search-query]');"
            "query.focus(); query.value = 'who gains hospitals'; query.dispatchEvent(new Event('keyup'))"
        )
        found = wait_for(
            browser, "return [...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
        )
        assert any("/hospitals.html" in link for link in found), found
        assert all(link.startswith(site.as_uri()) for link in found)
        assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]


SHOWN = """
return [...document.querySelectorAll('article img[src*="sample/"]')]
  .filter((image) => getComputedStyle(image).display !== 'none')
  .map((image) => [image.getAttribute('src'), image.complete && image.naturalWidth > 0])
"""


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_the_pictures_of_the_first_page_are_drawn_for_light_and_for_dark(
    ground: str, site: Path, browser: WebDriver
) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": ground}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get((site / "making" / "site.css").as_uri())  # a page without programs, which could remember another choice
    browser.execute_script("localStorage.clear()")
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelectorAll('img').forEach((image) => { image.loading = 'eager' })")
    wait_for(browser, f"return ({SHOWN.strip().removeprefix('return')}).every((each) => each[1])")
    shown = browser.execute_script(SHOWN)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(shown) == 7 and all(source.endswith(f"#only-{ground}") for source, _ in shown), shown
    texts = (site / shown[0][0].partition("#")[0]).read_text(encoding="utf-8")
    assert "Lakeside Rehab" in texts and ("#24292f" in texts) is (ground == "light")


def test_the_first_page_leads_to_a_report(site: Path, pages: dict[Path, Written], browser: WebDriver) -> None:
    (link,) = {link for _, _, link in pages[site / "index.html"].links if link.endswith("/report.html")}
    browser.get((site / link).as_uri())
    assert "Lakeside Rehab" in browser.page_source and "/tmp/" not in browser.page_source
    assert wait_for(browser, "return document.querySelectorAll('.plotly svg, .js-plotly-plot svg').length")


def test_logo_and_icon_are_the_projects_own(site: Path, pages: dict[Path, Written]) -> None:
    links = pages[site / "index.html"].links
    assert ("link", "href", "figures/logo.svg") in links and ("img", "src", "figures/logo.svg") in links
    assert (site / "figures" / "logo.svg").read_text(encoding="utf-8").startswith("<svg")


# ------------------------------------------------------------------------------------------------------- the reference

ROOMS = (  # modules whose public names are in the reference
    *("algorithms", "config", "data", "data.partitions", "errors", "evaluation", "memory", "models", "models.problem"),
    *("randomness", "results", "results.export", "results.figures", "results.report", "rows", "simulation.attacks"),
    *("simulation.privacy", "studies.comparison", "studies.recipes", "tables", "tracking"),
)
INSIDE = {  # what users do not import from, and why it is not in the reference
    "api": "what `import coterie` gives",
    "cli": "has a page of its own",
    "compute": "engines are chosen by name",
    "federation": "behind `coterie federate`",
    "kernels": "of the engines",
    "lazy": "behind the registries",
    "options": "behind everything that has options",
    "runs": "behind `run` and `resume`",
    "signals": "behind Ctrl-C",
    "tasks": "a table behind data, losses and metrics",
    "terminal_tables": "how a terminal shows what `tables` holds",
    "units": "how numbers of bytes are written",
    "user_code": "behind `import:` and methods in files",
    "version": "`coterie.__version__`",
    "yaml_file": "behind every file of settings",
}


def public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def test_every_room_is_in_the_reference_or_not_for_users() -> None:
    rooms = {entry.name for entry in pkgutil.iter_modules(coterie.__path__) if not entry.name.startswith("_")}
    known = {room.split(".")[0] for room in ROOMS}
    assert rooms == known | INSIDE.keys(), f"say in ROOMS or INSIDE: {sorted(rooms ^ (known | INSIDE.keys()))}"
    assert not known & INSIDE.keys()


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Written]) -> None:
    anchors = {anchor for path, page in pages.items() if path.parent.name == "reference" for anchor in page.anchors}
    server_math = importlib.import_module("coterie.algorithms.server_math")
    below = [f"algorithms.server_math.{entry.name}" for entry in pkgutil.iter_modules(server_math.__path__)]
    looked_at, missing = 0, []
    for module in (coterie, *(importlib.import_module(f"coterie.{room}") for room in (*ROOMS, *below))):
        names = [name for name in public_names(module) if name != "__version__"]
        assert names, module.__name__
        for name in names:
            value, looked_at = getattr(module, name), looked_at + 1
            # What several rooms give stands in one place, under the name it has there.
            known = {f"{module.__name__}.{name}", f"{getattr(value, '__module__', '')}.{name}"}
            known |= {f"coterie.{name}"} if name in coterie.__all__ else set()
            missing += [] if known & anchors else [f"{module.__name__}.{name}"]
    assert looked_at > 150 and not missing


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_the_command_line_is_the_programs_own(site: Path, pages: dict[Path, Written]) -> None:
    page = pages[site / "reference" / "command_line.html"]
    root = typer.main.get_command(app)
    assert isinstance(root, click.Group)
    found = list(commands(root, "coterie"))
    assert len(found) > 15
    whole = article(page)
    for number, (path, command) in enumerate(found):
        assert path.replace(" ", "-") in page.anchors, path
        begin = whole.index(f"{path} ¶")
        end = whole.index(f"{found[number + 1][0]} ¶") if number + 1 < len(found) else len(whole)
        for parameter in command.params:
            told = bare(getattr(parameter, "help", None) or "")
            assert told and told in bare(whole[begin:end]), (path, parameter.name)
            if isinstance(parameter, click.Option):
                assert max(parameter.opts, key=len) in whole[begin:end], (path, parameter.name)


def outputs(method: type[Algorithm]) -> Iterator[str]:
    gives = {
        "personal": method.has_personal,
        "global": method.has_global and not method.derived_global,
        "global (derived)": method.has_global and method.derived_global,
        "hybrid": method.has_hybrid,
    }
    yield ", ".join(model for model, given in gives.items() if given)


def test_generated_pages_have_what_there_is(site: Path, pages: dict[Path, Written]) -> None:
    assert set(registry.names()) <= pages[site / "reference" / "methods.html"].anchors
    methods = bare(article(pages[site / "reference" / "methods.html"]))
    for name in registry.names():
        method = registry.get(name)
        row = (name, method.title, *outputs(method), method.summary(), method.citation)
        assert all(bare(word) in methods for word in row) and bare("".join(row[:2])) in methods, name
        for parameter, info in method.model_fields.items():
            assert parameter in methods and bare(info.description or "") in methods, (name, parameter)
    configuration = bare(article(pages[site / "reference" / "configuration.html"]))
    for name, info in ExperimentConfig.model_fields.items():
        assert name in configuration and bare(info.description or "") in configuration, name
    federation = bare(article(pages[site / "federation.html"]))
    for name in registry.names():
        for line in lines(name):
            assert bare("".join((name, line.when, line.way, line.name, line.shape, line.to))) in federation, name
    catalogue = article(pages[site / "reference" / "catalogue.html"])
    named = [*data.names(), *partitions.SCHEMES, *models.names(), *METRICS, *(each.name for each in attacks.describe())]
    assert [name for name in named if name not in catalogue] == []
