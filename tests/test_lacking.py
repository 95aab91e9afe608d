"""The option --without: installed libraries cannot be excluded, and skipped tests are counted."""

import pytest

import lacking


@pytest.fixture(autouse=True)
def nothing_excluded(monkeypatch):
    monkeypatch.setattr(lacking, "EXCLUDED", set())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def test_installed_library_cannot_be_excluded(monkeypatch):
    monkeypatch.setitem(lacking.HAS, "ray", lambda: True)
    with pytest.raises(pytest.UsageError, match=r"^ray is installed\. Remove --without ray\.$"):
        lacking.leave_out(["ray"])


def test_tests_are_skipped_only_if_excluded(monkeypatch):
    monkeypatch.setitem(lacking.HAS, "ray", lambda: False)
    assert lacking.needs("ray", "openvino").args == (False,)  # it runs, and fails without ray
    lacking.leave_out(["ray"])
    assert lacking.needs("ray", "openvino").args == (True,)
    assert lacking.needs("ray", "openvino").kwargs == {"reason": "skipped by --without ray"}
    assert lacking.needs("openvino").args == (False,)
    with pytest.raises(pytest.skip.Exception, match="skipped by --without ray"):
        lacking.stop_without("ray")
    lacking.stop_without("openvino")
    assert lacking.library("ray.cluster_utils") is None and lacking.library("os.path").sep


def test_excluded_gpu_is_hidden():
    """Only the environment variable is checked, because CUDA may already be initialised in this process."""
    lacking.leave_out(["cuda"])
    assert lacking.os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert lacking.summary([]) == ["skipped by --without cuda: every case on a GPU"]


def test_skipped_tests_are_counted():
    reasons = ["Skipped: skipped by --without ray", "Skipped: unconditional skip", "Skipped: skipped by --without ray"]
    assert lacking.summary(reasons) == ["skipped by --without ray: 2 tests"]
    with pytest.raises(AssertionError, match="--without knows ray"):
        lacking.needs("rya")
