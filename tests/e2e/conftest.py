"""Fixtures for tests of the pages that experiments/ makes."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import results_page

    yield results_page
    for name in [name for name, module in sys.modules.items() if _is_ours(module)]:
        del sys.modules[name]


def _is_ours(module):
    return str(getattr(module, "__file__", None) or "").startswith(str(ROOT / "experiments"))
