"""--without says what a machine lacks: what it has cannot be left out, and what is left out is counted."""

import pytest

import lacking


@pytest.fixture(autouse=True)
def nothing_left_out(monkeypatch):
    monkeypatch.setattr(lacking, "LEFT_OUT", set())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def test_what_is_installed_cannot_be_left_out(monkeypatch):
    monkeypatch.setitem(lacking.HAS, "ray", lambda: True)
    with pytest.raises(pytest.UsageError, match=r"^ray is installed: leave out --without ray\.$"):
        lacking.leave_out(["ray"])


def test_a_test_is_left_out_only_where_that_was_said(monkeypatch):
    monkeypatch.setitem(lacking.HAS, "ray", lambda: False)
    assert lacking.needs("ray", "plotly").args == (False,)  # it runs, and fails where there is no ray
    lacking.leave_out(["ray"])
    assert lacking.needs("ray", "plotly").args == (True,)
    assert lacking.needs("ray", "plotly").kwargs == {"reason": "left out for want of ray"}
    assert lacking.needs("plotly").args == (False,)
    with pytest.raises(pytest.skip.Exception, match="left out for want of ray"):
        lacking.stop_without("ray")
    lacking.stop_without("plotly")
    assert lacking.library("ray.cluster_utils") is None and lacking.library("os.path").sep


def test_a_gpu_that_is_left_out_is_hidden():
    """In a process of its own CUDA would see none; here it is too late for that."""
    lacking.leave_out(["cuda"])
    assert lacking.os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert lacking.summary([]) == ["left out for want of cuda: every case on a GPU"]


def test_what_is_left_out_is_counted():
    reasons = ["Skipped: left out for want of ray", "Skipped: unconditional skip", "Skipped: left out for want of ray"]
    assert lacking.summary(reasons) == ["left out for want of ray: 2 tests"]
    with pytest.raises(AssertionError, match="--without knows ray"):
        lacking.needs("rya")
