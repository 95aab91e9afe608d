"""Settings of all tests, the option --without, and the devices of this machine."""

import os

import torch
from hypothesis import HealthCheck, settings

import depthfold.vision  # noqa: F401  (makes torchvision importable on machines without CUDA)
from lacking import HAS, devices, leave_out, summary

os.environ["ACCELERATE_USE_CPU"] = "true"  # trainings run on the CPU by default, in every process
torch.set_num_threads(1)
_COMMON = dict(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)
settings.register_profile("short", max_examples=25, **_COMMON)
settings.register_profile("long", max_examples=1500, **_COMMON | dict(derandomize=False))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def pytest_addoption(parser):
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=list(HAS),
        help="Skip the tests that need this. May be repeated.",
    )


def pytest_configure(config):
    leave_out(config.getoption("--without"))


def pytest_generate_tests(metafunc):
    """Run tests with the argument `device` on all devices of this machine."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())


def pytest_collection_modifyitems(items):
    """Start with the files that take minutes, so that no worker is left alone with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_ray.py", "test_examples.py"))


def pytest_terminal_summary(terminalreporter):
    for line in summary(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)
