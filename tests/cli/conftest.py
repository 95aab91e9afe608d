"""A folder with a user's file and settings, and a run that is compressed there once for all tests."""

import shutil

import pytest

from cli_workshop import CONFIG, NET, depthfold, without_memory


@pytest.fixture(autouse=True)
def memory_not_measured():
    """Apply to each test separately: other tests in this process measure memory."""
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
    """Return the result of `depthfold compress` for the run `whole`."""
    with without_memory():
        result = depthfold("compress", "--config", workshop / "tiny.toml", "--run", workshop / "whole")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def run(workshop, compressed, tmp_path):
    """Return a copy of the finished run that the test may damage."""
    return shutil.copytree(workshop / "whole", tmp_path / "run")
