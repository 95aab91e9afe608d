"""The documentation as a site, without building it: every page is in the navigation, and links and names resolve.

`make docs` builds the site, and checks the same and more.
"""

import importlib
import re
from pathlib import Path

import pytest
import yaml

import depthfold as df

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
STAGED = re.search(r"^PAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in STAGED
    for found in ROOT.glob(pattern)
    for page in ([found] if found.is_file() else found.rglob("*.md"))
    if page.suffix == ".md"
)
API = {page.name: page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")}


def pages_of(nav):
    for entry in nav:
        (value,) = entry.values()
        yield from [value] if isinstance(value, str) else pages_of(value)


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(text):
    """Return the anchors of the headings of a page, as mkdocs and GitHub name them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_navigation_lists_every_page_once():
    assert sorted(pages_of(CONFIG["nav"])) == PAGES
    assert len(PAGES) > 25


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_pages_and_files_of_the_site(page):
    here = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(here.read_text())):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (here.parent / path).resolve() if path else here
        assert target.is_file(), link
        staged = target.relative_to(ROOT)
        assert any(staged.match(pattern) or staged.parts[0] == pattern for pattern in STAGED), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_public_name_is_in_the_api_reference():
    headings = re.findall(r"^(?:::: |      heading: )(depthfold\S*)$", "\n".join(API.values()), re.MULTILINE)
    for name in df.__all__:
        if name not in ("__version__", "DepthfoldError"):  # the page of the errors shows their whole module
            assert headings.count(f"depthfold.{name}") == 1, name
    assert "depthfold.errors" in headings


@pytest.mark.parametrize("page", sorted(API))
def test_names_in_the_api_reference_exist_and_are_documented(page):
    entries = re.findall(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", API[page], re.MULTILINE)
    assert entries
    for path, heading in entries:
        found = resolved(path)
        assert found.__doc__, path
        assert not heading or resolved(heading) is found, path


def resolved(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_site_asks_no_other_server_for_fonts():
    assert CONFIG["theme"]["font"] is False
