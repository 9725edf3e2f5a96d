"""The page as its reader has it: opened from the disk by a real browser."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from coterie.results import report
from tests.results.report.folders import GROUPS, weights_of, write_run
from tests.results.report.test_page import EVIL

LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
ORDER = np.lexsort((np.arange(len(GROUPS)), GROUPS))


class Page:
    """A report in the browser."""

    def __init__(self, browser: Chrome, path: Path) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(path.as_uri())
        self.wait("return document.documentElement.dataset.ready === 'true'")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> None:
        WebDriverWait(self.browser, 60, poll_frequency=0.05).until(lambda _: self.run(script, *arguments))

    def emulate(self, media: str = "", scheme: str = "light") -> None:
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": wanted})

    def sections(self) -> list[str]:
        found: list[str] = self.run("return [...document.querySelectorAll('section')].map(each => each.id)")
        return found

    def plot(self, key: str, what: str) -> Any:
        return self.run(f"return document.getElementById('plot-{key}').{what}")

    def ground(self) -> str:
        return str(self.run("return getComputedStyle(document.body).backgroundColor"))

    def matrix(self) -> np.ndarray:
        rows = self.run("return document.getElementById('plot-weights')._fullData[0].z.map(row => Array.from(row))")
        return np.array(rows, dtype=np.float32)

    def complaints(self) -> list[Any]:
        return list(self.browser.get_log("browser"))

    def requests(self) -> list[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about runs that have everything."""
    folder = tmp_path_factory.mktemp("whole")
    runs = [
        write_run(folder / f"{name}-{seed}", name, seed, matrix=name == "fedacs", level=level)
        for name, level in (("fedacs", 0.7), ("fedamp", 0.6))
        for seed in (1, 2)
    ]
    runs.append(write_run(folder / "attacked", "fedamp", 1, attack="gaussian:0.34"))
    runs.append(write_run(folder / "between", "fedavg", 1, shares=False, weights=False, federated=True))
    return report.write([run.path for run in runs], folder / "report.html", progress=False).page


@pytest.fixture
def page(browser: Chrome, whole: Path) -> Iterator[Page]:
    opened = Page(browser, whole)
    yield opened
    opened.run("try { localStorage.clear() } catch {}")
    opened.emulate()


def test_nothing_goes_wrong_and_nobody_is_asked(page: Page, whole: Path) -> None:
    drawn = page.run("return [...document.querySelectorAll('.plot')].map(each => each.querySelectorAll('svg').length)")
    assert len(drawn) >= 10 and min(drawn) > 0
    for key in ("weights", "matrix", "shares"):  # whatever can be chosen is drawn too
        for choice in page.browser.find_elements(By.CSS_SELECTOR, f"select[data-of='{key}']"):
            Select(choice).select_by_index(len(Select(choice).options) - 1)
    ActionChains(page.browser).move_to_element(page.browser.find_element(By.ID, "plot-curves-accuracy")).perform()
    page.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.complaints() == []
    assert {url for url in page.requests() if not re.match("data:|blob:|about:", url)} == {whole.as_uri()}


def test_all_sections_are_there_for_runs_that_have_all(page: Page) -> None:
    everything = ["summary", "curves", "clients", "fairness", "weights", "others", "robustness", "shares", "costs"]
    assert page.sections() == [*everything, "events", "repeat"]
    assert page.run("return [...document.querySelectorAll('nav a')].map(each => each.hash.slice(1))") == page.sections()
    levels = page.run("return [...document.querySelectorAll('h1,h2,h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_a_run_without_has_none_of_it(browser: Chrome, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "local", weights=False, shares=False, traffic=False, finish=False).path
    page = Page(browser, report.write([run], tmp_path / "report.html", progress=False).page)
    assert page.sections() == ["summary", "curves", "clients", "fairness", "costs", "repeat"]
    assert page.complaints() == []


def test_the_slider_moves_the_heat_map(page: Page) -> None:
    def recorded(number: int) -> np.ndarray:
        return weights_of(number)[ORDER][:, ORDER].astype(np.float32)

    np.testing.assert_array_equal(page.matrix(), recorded(3))
    rail = page.browser.find_element(By.CSS_SELECTOR, "#plot-weights .slider-rail-touch-rect")
    page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", rail)
    half = rail.rect["width"] / 2
    for offset, number in ((-half + 8, 1), (0, 2)):
        ActionChains(page.browser).move_to_element_with_offset(rail, int(offset), 0).click().perform()
        page.wait(
            "return document.getElementById('plot-weights')._fullLayout.sliders[0].active === arguments[0]", number - 1
        )
        np.testing.assert_array_equal(page.matrix(), recorded(number))
    page.run("document.getElementById('theme').click()")
    np.testing.assert_array_equal(page.matrix(), recorded(2))  # other colours, the same round
    assert "round 2" in page.plot("weights", "querySelector('.slider-group').textContent")


def test_tooltips_say_client_numbers(page: Page) -> None:
    area = page.browser.find_element(By.CSS_SELECTOR, "#plot-weights .nsewdrag")
    page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", area)
    wide, high = (area.rect[side] / 2 - area.rect[side] / 12 for side in ("width", "height"))
    ActionChains(page.browser).move_to_element_with_offset(area, int(wide), -int(high)).perform()  # the corner's cell
    page.wait("return document.querySelector('#plot-weights .hoverlayer').textContent")
    said = page.plot("weights", "querySelector('.hoverlayer').textContent")
    first, last = ORDER[0], ORDER[5]
    assert f"taker: client {first} (group 0)" in said and f"giver: client {last} (group 1)" in said


def test_another_run_can_be_chosen(page: Page) -> None:
    choice = Select(page.browser.find_element(By.CSS_SELECTOR, "select[data-of='weights']"))
    labels = [option.text for option in choice.options]
    assert labels == [
        "FedACS, attack=none, seed 1",
        "FedAMP, attack=none, seed 1",
        "FedAMP, attack=gaussian:0.34, seed 1",
    ]
    choice.select_by_index(1)
    page.wait("return document.getElementById('plot-weights').dataset.variant === '1'")
    notes = page.run("return [...document.querySelectorAll('.note[data-of=weights]')].map(each => each.hidden)")
    assert notes == [True, False, True]


def test_the_toggle_changes_page_and_plots(page: Page) -> None:
    button = page.browser.find_element(By.ID, "theme")
    light = page.plot("curves-accuracy", "_fullLayout.font.color")
    assert (page.ground(), button.text) == (LIGHT, "Dark colours")
    button.click()
    assert (page.ground(), button.text) == (DARK, "Light colours")
    dark = page.plot("curves-accuracy", "_fullLayout.font.color")
    assert dark != light
    grid = page.plot("curves-accuracy", "querySelector('.gridlayer path').style.stroke")
    button.click()
    assert page.ground() == LIGHT and page.plot("curves-accuracy", "_fullLayout.font.color") == light
    assert page.plot("curves-accuracy", "querySelector('.gridlayer path').style.stroke") != grid


def test_a_reader_who_prefers_dark_gets_dark(browser: Chrome, whole: Path, page: Page) -> None:
    page.emulate(scheme="dark")
    again = Page(browser, whole)
    assert again.ground() == DARK and "Light" in again.browser.find_element(By.ID, "theme").text
    light = again.plot("weights", "_fullLayout.font.color")
    page.emulate(scheme="light")
    again.wait("return document.getElementById('plot-weights')._fullLayout.font.color !== arguments[0]", light)
    assert again.ground() == LIGHT


def test_paper_shows_every_section_in_light_colours(page: Page) -> None:
    light = page.plot("curves-accuracy", "_fullLayout.font.color")
    page.browser.find_element(By.ID, "theme").click()
    page.emulate(media="print", scheme="dark")
    page.wait("return document.getElementById('plot-curves-accuracy')._fullLayout.font.color === arguments[0]", light)
    assert page.ground() == LIGHT
    assert page.run("return getComputedStyle(document.getElementById('theme')).display") == "none"
    heights = page.run("return [...document.querySelectorAll('section')].map(each => each.offsetHeight)")
    assert min(heights) > 60
    breaks = page.run(
        "return [...document.querySelectorAll('section')].map(each => getComputedStyle(each).breakBefore)"
    )
    assert breaks == ["auto"] + ["page"] * (len(breaks) - 1)
    assert page.plot("curves-accuracy", "_fullLayout.width") == 680
    page.emulate()
    page.wait("return document.getElementById('plot-curves-accuracy')._fullLayout.font.color !== arguments[0]", light)
    assert page.ground() == DARK


def test_tables_are_sorted_by_the_column_that_is_chosen(page: Page) -> None:
    def column(place: int) -> list[str]:
        script = (
            "return [...document.querySelectorAll('#costs tbody tr')].map(row => row.cells[arguments[0]].textContent)"
        )
        found: list[str] = page.run(script, place)
        return found

    before = column(0)
    names, sent = (f"#costs thead th:nth-child({place})" for place in (1, 4))
    page.run("document.querySelector(arguments[0]).click()", names)
    assert column(0) == sorted(before) != before
    page.run("document.querySelector(arguments[0]).click()", names)
    assert column(0) == sorted(before, reverse=True)
    assert page.run("return document.querySelector(arguments[0]).getAttribute('aria-sort')", names) == "descending"
    page.run("document.querySelector(arguments[0]).click()", sent)  # of numbers the greatest comes first
    assert page.run("return document.querySelector(arguments[0]).getAttribute('aria-sort')", sent) == "descending"
    assert page.run("return document.querySelector(arguments[0]).getAttribute('aria-sort')", names) == "none"
    assert page.complaints() == []


def test_it_prints(page: Page) -> None:
    printed = page.browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})["data"]
    pages = len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed)))
    assert pages >= len(page.sections())


def test_what_people_write_stays_text(browser: Chrome, tmp_path: Path) -> None:
    run = write_run(tmp_path / "<i>run", classes=(EVIL, "dog"), federated=True).path
    page = Page(browser, report.write([run], tmp_path / "report.html", title=EVIL, progress=False).page)
    assert page.run("return typeof window.broken") == "undefined"
    assert page.browser.title == EVIL and page.browser.find_element(By.TAG_NAME, "h1").text == EVIL
    assert page.run("return document.querySelectorAll('img, i').length") == 0
    ticks = page.run(
        "return [...document.querySelectorAll('#plot-shares .yaxislayer-above text')].map(e => e.textContent)"
    )
    assert EVIL in ticks
    assert page.complaints() == []
