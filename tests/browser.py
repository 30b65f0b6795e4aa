"""A browser for tests of pages. Tests that need one are skipped where there is no Chromium with its driver."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium with its driver")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--no-first-run", "--disable-sync", "--disable-component-update", "--window-size=1300,1000",
)  # fmt: skip


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window, with the log of its console."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER or ""
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def wait(browser: Any, condition: str) -> None:
    end = time.monotonic() + 30
    while not browser.execute_script(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)
