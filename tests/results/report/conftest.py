"""A headless Chromium for the tests of the page."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PROGRAMS = ("chromium", "chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)
HOW = "these tests open the page in Chromium: install it (on Debian: apt-get install chromium chromium-driver)"


def programs() -> tuple[str, str]:
    """Find Chromium and its driver; install them where we may, once for all processes that test side by side."""
    with (Path(tempfile.gettempdir()) / "coterie-tests-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(map(shutil.which, PROGRAMS)) and os.geteuid() == 0 and shutil.which("apt-get"):
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "chromium-driver"]):
                done = subprocess.run(
                    ["apt-get", "--quiet", *command], env=quiet, capture_output=True, check=False, timeout=600
                )
                if done.returncode:
                    break
    chromium, driver = map(shutil.which, PROGRAMS)
    if chromium is None or driver is None:
        pytest.skip(HOW)
    return chromium, driver


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """A browser that writes down what its console says and what it asks the network for."""
    chromium, driver = programs()
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(120)
    chrome.set_script_timeout(120)
    yield chrome
    chrome.quit()
