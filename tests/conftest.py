"""Settings that all tests share, the devices of this machine, and what it lacks."""

import os

import torch
from hypothesis import HealthCheck, settings

import depthfold.vision  # noqa: F401  (makes torchvision importable where its wheel is broken)
from lacking import HAS, devices, leave_out, summary

os.environ["ACCELERATE_USE_CPU"] = "true"  # a training that names no device runs on the CPU, in every process
torch.set_num_threads(1)
_COMMON = dict(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)
settings.register_profile("short", max_examples=120, **_COMMON)
settings.register_profile("long", max_examples=1500, **_COMMON | dict(derandomize=False))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def pytest_addoption(parser):
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=list(HAS),
        help="This machine lacks it: leave out the tests that need it. May be given again.",
    )


def pytest_configure(config):
    leave_out(config.getoption("--without"))


def pytest_generate_tests(metafunc):
    """A test that takes `device` is run on each that this machine has."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())


def pytest_terminal_summary(terminalreporter):
    for line in summary(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)
