"""Take the README's screenshots of what a report begins with, for a light and a dark page.

    depthfold demo --run demo
    python -m experiments.demo.screenshot demo

It writes docs/pictures/report-light.png and report-dark.png. It needs playwright, and chromium on the PATH
(`make browser`).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH, HEIGHT, SCALE = 880, 228, 1.2
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    report = parser.parse_args().run.resolve() / "report.html"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in SCHEMES:
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, device_scale_factor=SCALE
            )
            page.goto(report.as_uri(), wait_until="networkidle")
            box = page.locator("#outcome").bounding_box()
            assert box is not None
            shown = {"x": 0, "y": box["y"] - 24, "width": WIDTH, "height": HEIGHT}
            page.screenshot(path=PICTURES / f"report-{scheme}.png", full_page=True, clip=shown)
        browser.close()


if __name__ == "__main__":
    main()
