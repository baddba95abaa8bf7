#!/usr/bin/env python3
"""Make the pictures of docs/watch.md: the page of a run, as a desktop and a phone show it.

Needs the extra `dev` and a chromium. Each picture is a PNG of at most 200 kB.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.watch import Watch

MOST_BYTES = 200_000
SECONDS = 120  # on a host that has much other work
VIEWS = {  # name: width, height, colours
    "watch": (1100, 1290, "light"),
    "watch_phone": (360, 800, "dark"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, best while it goes on over links")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    page = Watch(WatchedRun(arguments.run))
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, (width, height, colours) in VIEWS.items():
                tab = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=colours
                )
                tab.set_default_timeout(SECONDS * 1000)
                tab.goto(page.address)
                tab.locator("#chart-utilization").scroll_into_view_if_needed()  # or it is not drawn
                tab.wait_for_selector("#chart-utilization canvas")
                tab.evaluate("window.scrollTo(0, 0)")
                tab.wait_for_selector("#lanes svg")
                tab.wait_for_timeout(1500)
                path = arguments.out / f"{name}.png"
                tab.screenshot(path=path)
                whole = Image.open(path).convert("RGB")
                whole.quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)
                size = path.stat().st_size
                if size > MOST_BYTES:
                    raise SystemExit(f"{path} has {size} bytes; make the view of it smaller")
                print(f"{path}: {size} bytes")
            browser.close()
    finally:
        page.close()


if __name__ == "__main__":
    main()
