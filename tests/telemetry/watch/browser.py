"""A real browser for tests of the page: Debian's chromium, driven by playwright."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)
with_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs playwright (the extra `dev`) and chromium: apt-get install chromium",
)


class Tab:
    """A page of the browser, and what it has complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def text(self, selector: str) -> str:
        """Return what an element shows."""
        return self.page.inner_text(selector)

    def wait(self, condition: str, seconds: float = 10.0) -> None:
        """Wait until an expression of JavaScript is true."""
        until = time.monotonic() + seconds
        while not self.page.evaluate(condition):  # wait_for_function would eval in the page
            assert time.monotonic() < until, condition
            self.page.wait_for_timeout(50)


@contextmanager
def opened(
    address: str, width: int = 1280, height: int = 900, scheme: str = "light"
) -> Iterator[Tab]:
    """Open an address in a browser of its own; no complaint must come until it is closed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 600
        )  # type: ignore[arg-type]
        tab = Tab(context.new_page())
        tab.page.goto(address)
        yield tab
        assert tab.complaints == []
        browser.close()
