"""Headless Chromium for tests, driven by Selenium: one start, an empty profile, no network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
WAIT_S = 300.0  # much longer than anything takes, for a loaded machine
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


@contextmanager
def chromium(profile: Path, width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """A driver; skips the test where browser, driver or selenium are not installed."""
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("no chromium and chromedriver here; apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=CHROMEDRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_script_timeout(WAIT_S)
        driver.set_page_load_timeout(WAIT_S)
        yield driver
    finally:
        driver.quit()


def artefacts(otherwise: Path) -> Path:
    """Where screenshots stay: the folder that ``TENSORPAGER_ARTEFACTS`` names, or ``otherwise``."""
    folder = Path(os.environ.get("TENSORPAGER_ARTEFACTS") or otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
