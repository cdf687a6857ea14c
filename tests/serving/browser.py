"""Debian's Chromium, without a window, on a page of a test's server."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

__all__ = ["Browser", "is_installed"]

_SECONDS = 30
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


def is_installed() -> bool:
    """Tell whether the browser and its driver are there."""
    return all(map(shutil.which, ("chromium", "chromedriver")))


class Browser:
    """One tab. Elements are found by id."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for option in _OPTIONS:
            options.add_argument(option)
        service = Service(str(shutil.which("chromedriver")), env={**os.environ, "TZ": "UTC"})
        self.driver = webdriver.Chrome(options=options, service=service)
        self.size(1280, 1700)

    def quit(self) -> None:
        """End it."""
        self.driver.quit()

    def open(self, url: str) -> None:
        """Show a page, in a tab that knows nothing."""
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.get(url)

    def sign_in(self, key: str) -> None:
        """Type a key and press Enter."""
        self.wait(lambda: self.element("key").is_displayed())
        self.element("key").send_keys(key + "\n")

    def element(self, name: str) -> Any:
        """Return an element by its id."""
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        """Return what a person reads in an element."""
        return str(self.element(name).text)

    def count(self, selector: str) -> int:
        """Return how many elements a CSS selector finds."""
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def script(self, text: str) -> Any:
        """Return the value of an expression of JavaScript."""
        return self.driver.execute_script(f"return {text}")

    def wait(self, until: Callable[[], object]) -> None:
        """Return once ``until`` is true."""
        WebDriverWait(self.driver, _SECONDS, poll_frequency=0.1).until(lambda _: until())

    def size(self, width: int, height: int) -> None:
        """Make the page so wide and high, as a device would."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def colours(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def errors(self) -> list[str]:
        """Return what the console complained of since the last call."""
        found = self.driver.get_log("browser")
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]

    def picture(self, path: Path) -> None:
        """Save the page as it is shown."""
        self.driver.save_screenshot(str(path))
