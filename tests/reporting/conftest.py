"""The browser in which the tests of the report open pages."""

import shutil

import pytest

OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@pytest.fixture(scope="session")
def browser():
    found = shutil.which("chromium")
    if found is None:
        pytest.fail(
            "The report is tested in chromium, which is not installed. Run: make browser, or as root "
            "apt-get install -y chromium"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(OPTIONS))
        yield chromium
        chromium.close()
