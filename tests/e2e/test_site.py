"""The documentation as a site, without building it: every page is in the navigation, and links and names resolve.

`make docs` builds the site, and checks the same and more.
"""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml

import depthfold as df
from depthfold import baselines

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
ENTRY = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.MULTILINE)
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").iterdir())]


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
    entries = ENTRY.findall(API[page])
    assert entries
    for path, heading in entries:
        found = resolved(path)
        assert found.__doc__ or isinstance(found, MappingProxyType), path  # constants have no __doc__
        assert not heading or resolved(heading) is found, path


def resolved(path):
    """Return the object or the module with this dotted path. A name of a package precedes a module of that name."""
    parent, _, name = path.rpartition(".")
    if not parent:
        return importlib.import_module(path)
    found = importlib.import_module(parent)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(path)


@pytest.fixture(scope="module")
def in_the_reference():
    """Return whether an object is on a page of the API reference, itself or with its whole module."""
    documented = [resolved(path) for text in API.values() for path, _ in ENTRY.findall(text)]
    modules = [entry.__name__ for entry in documented if inspect.ismodule(entry)]
    return lambda value: any(value is entry for entry in documented) or getattr(value, "__module__", "") in modules


def test_every_baseline_is_in_the_api_reference(in_the_reference):
    assert [name for name in baselines.__all__ if not in_the_reference(getattr(baselines, name))] == []


def python_of(file):
    """Return the Python code of a document, a notebook or a script."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    if file.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return "\n".join("".join(cell["source"]) for cell in cells)
    return text if file.suffix == ".py" else ""


def names_used(code):
    """Return the dotted paths of the names of depthfold that some code imports, or reads from an imported module."""
    tree, bound, found = ast.parse(code), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("depthfold."):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            mine = [alias for alias in node.names if f"{alias.name}.".startswith("depthfold.")]
            bound |= {alias.asname or "depthfold": alias.name if alias.asname else "depthfold" for alias in mine}
    for node in ast.walk(tree):
        path = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if isinstance(node, ast.Name) and node.id in bound:
            found.add(".".join([bound[node.id], *path]))
    return found


def public(path):
    """Return the part of a path up to the first name that is not a module; None if all of them are modules."""
    names = path.split(".")
    for length in range(2, len(names) + 1):
        part = ".".join(names[:length])
        if not inspect.ismodule(resolved(part)):
            return part
    return None


@pytest.mark.parametrize("file", SHOWN, ids=lambda file: file.name)
def test_names_that_documents_and_examples_use_are_in_the_api_reference(file, in_the_reference):
    used = names_used(python_of(file))
    if file.suffix == ".md":
        used |= set(re.findall(r"`(depthfold(?:\.\w+)+)", file.read_text()))
    names = sorted({name for name in map(public, used) if name and not name.endswith("__version__")})
    assert [name for name in names if not in_the_reference(resolved(name))] == []


def test_names_are_found_in_every_form_of_import():
    code = """
import depthfold as df
import depthfold.demo
from depthfold import baselines
from depthfold.core import Score as Entry
df.Plan.loads(text); depthfold.demo.model(); baselines.PATTERNS["a"].b; Entry(); other.df.trace
"""
    found = {"Plan.loads", "demo.model", "baselines.PATTERNS", "core.Score"}
    assert names_used(code) - {"depthfold", "depthfold.baselines"} >= {f"depthfold.{name}" for name in found}
    assert {public(f"depthfold.{name}") for name in found} == {
        "depthfold.Plan", "depthfold.demo.model", "depthfold.baselines.PATTERNS", "depthfold.core.Score",
    }  # fmt: skip
    assert not any("trace" in name for name in names_used(code))


def test_site_asks_no_other_server_for_fonts():
    assert CONFIG["theme"]["font"] is False
