"""A folder with a user's file and settings, and a run that was compressed there once for all tests."""

import contextlib
import importlib
import shutil

import pytest

from cli_workshop import CONFIG, NET, depthfold


@contextlib.contextmanager
def without_memory():
    """Peak memory takes a process with torch of its own for every network; its tests are those of latency."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("depthfold.latency.profile")  # the attribute of that name is the function
        patch.setattr(module, "peak_memory", lambda *_: (None, "not measured in these tests"))
        yield


@pytest.fixture(autouse=True)
def memory_not_measured():
    """For each test by itself: other tests of this process do measure it."""
    with without_memory():
        yield


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "net.py").write_text(NET)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="session")
def compressed(workshop):
    """What `depthfold compress` printed, for the run `whole`."""
    with without_memory():
        result = depthfold("compress", "--config", workshop / "tiny.toml", "--run", workshop / "whole")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def run(workshop, compressed, tmp_path):
    """A copy of the finished run, to do harm to."""
    return shutil.copytree(workshop / "whole", tmp_path / "run")
