"""The code in the documents runs as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, capsys):
    namespace = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)
    if page.name == "README.md":
        printed = capsys.readouterr().out
        assert "50 layers, 33 activations, 10 skips" in printed
        assert "tolerance 1e-04" in printed
        assert namespace["shallow"](namespace["torch"].randn(2, 3, 33, 33)).shape == (2, 10)
