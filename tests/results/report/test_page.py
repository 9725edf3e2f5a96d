"""The file: whole by itself, safe whatever a run is called, and small for a thousand clients."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, RunFolderError
from coterie.results import report
from coterie.results.report.page import _data
from coterie.results.report.writer import _stem
from tests.results.report.folders import write_run

EVIL = '</script><script>window.broken=1</script><img src=x onerror="window.broken=1">'


def data(page: str) -> dict[str, Any]:
    pattern = re.compile(r'<script type="application/json" id="([\w.-]+)">(.*?)</script>', re.S)
    return {key: json.loads(text) for key, text in pattern.findall(page)}


def test_one_file_that_needs_no_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", matrix=True).path
    written = report.write([run], tmp_path / "report.html", progress=False)
    page = written.page.read_text(encoding="utf-8")
    assert page.count(get_plotlyjs()) == 1
    own = page.replace(get_plotlyjs(), "")
    assert re.findall(r"(?:src|href)\s*=\s*[\"']?(?!#)([^\"'\s>]+)", own) == ["data:,"]
    assert "http://" not in own and "https://" not in own and "@import" not in own and "url(" not in own
    assert written.sections == re.findall(r'<section id="([\w-]+)"', own)
    assert re.findall(r'<li><a href="#([\w-]+)"', own) == written.sections


def test_only_the_pages_own_scripts_may_run(tmp_path: Path) -> None:
    report.write([write_run(tmp_path / "run").path], tmp_path / "report.html", progress=False)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1])  # type: ignore[index]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2 and scripts[0] == get_plotlyjs()
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in policy
    assert "default-src 'none'" in policy


def test_nothing_that_people_write_breaks_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>run", classes=(EVIL, "</script>", "dog"), federated=True).path
    report.write([run], tmp_path / "report.html", title=EVIL, progress=False)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    own = page.replace(get_plotlyjs(), "")
    assert EVIL not in own and "<img" not in own and "<b>run" not in own
    assert html.escape(EVIL) in own
    found = data(own)
    assert own.count("</script>") == len(found) + 2
    ticks = found["figure-shares-0"]["layout"]["yaxis"]["ticktext"]
    assert [html.unescape(text) for text in ticks] == [EVIL, "</script>", "dog"]


def test_data_cannot_end_the_element_that_they_stand_in() -> None:
    value = {"text": f"{EVIL}<!--<script>&amp;\u2028"}
    written = _data("key", value)
    inside = written.removeprefix('<script type="application/json" id="key">').removesuffix("</script>")
    assert not set("<>&\u2028") & set(inside)
    assert json.loads(inside) == value


def test_figures_have_no_template_and_the_page_has_both(tmp_path: Path) -> None:
    report.write([write_run(tmp_path / "run").path], tmp_path / "report.html", progress=False)
    found = data((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert set(found["themes"]) == {"light", "dark"}
    assert all("template" not in figure["layout"] for key, figure in found.items() if key.startswith("figure-"))


def test_a_thousand_clients_are_a_few_megabytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", clients=1000, rounds=4).path
    report.write([run], tmp_path / "report.html", progress=False)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    figure = data(page)["figure-weights-0"]
    assert figure["data"][0]["z"]["shape"] == "100, 100" and len(figure["frames"]) == 4
    # Of 40 rounds at most, 100 x 100 numbers of 4 bytes in base 64 each: 2.2 MB. The rest is 1,000 clients, not rounds.
    weights = len(json.dumps(figure["frames"])) / 4 * 40
    assert weights < 2.3e6
    assert len(page) - len(get_plotlyjs()) - len(json.dumps(figure["frames"])) < 0.5e6


def test_a_slider_has_no_more_rounds_than_its_numbers_allow(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", clients=2, rounds=100).path
    report.write([run], tmp_path / "report.html", progress=False)
    frames = [
        int(frame["name"]) for frame in data((tmp_path / "report.html").read_text())["figure-weights-0"]["frames"]
    ]
    assert len(frames) == 40 and frames[0] == 1 and frames[-1] == 100 and frames == sorted(frames)


def test_labels_that_make_one_file_name_make_two_files() -> None:
    taken: set[str] = set()
    names = [_stem(["weights", label], taken) for label in ("fedacs, a b", "fedacs, a-b", "Fedacs, a/b", "../../x")]
    assert names == ["weights-fedacs-a-b", "weights-fedacs-a-b-2", "weights-Fedacs-a-b-3", "weights-..-..-x"]


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a").path, write_run(tmp_path / "b", "local", weights=False).path
    done = command(
        one, two, "--out", tmp_path / "out/page.html", "--figures", tmp_path / "figures", "--title", "A <title>"
    )
    assert done.exit_code == 0, done.output
    assert f"report: {tmp_path / 'out/page.html'}" in done.output.replace("\n", "")
    assert "<title>A &lt;title&gt;</title>" in (tmp_path / "out/page.html").read_text(encoding="utf-8")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    stems = {"curves-accuracy", "curves-loss", "clients-accuracy", "sorted-accuracy", "fairness-accuracy", "weights"}
    stems |= {"gains-local", "who-gains-local"}
    stems |= {"shares-FedACS-seed-1", "shares-Local-seed-1", "bytes", "seconds"}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}


def test_a_file_that_is_no_page_is_not_overwritten(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run").path
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"out is .*thesis\.tex', but must be a file that ends in \.html"):
        report.write([run], tmp_path / "thesis.tex", progress=False)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match="which is a folder"):
        report.write([run], tmp_path / "folder.html", progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        report.write([run], tmp_path / "file/report.html", progress=False)
    with pytest.raises(RunFolderError, match="cannot be written"):
        report.write([run], tmp_path / "report.html", static=tmp_path / "file", progress=False)


def test_the_title_says_what_the_runs_are(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, name, weights=False).path for name in ("fedacs", "local")]
    for given, title in ((paths[:1], "fedacs"), (paths, "FedACS, Local")):
        report.write(given, tmp_path / "report.html", progress=False)
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert f"<h1>{title}</h1>" in page and "data digits" in page
