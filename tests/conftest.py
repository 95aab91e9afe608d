"""Settings that all tests share."""

import os

import torch
from hypothesis import HealthCheck, settings

import depthfold.vision  # noqa: F401  (makes torchvision importable where its wheel is broken)

torch.set_num_threads(1)
_COMMON = dict(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)
settings.register_profile("short", max_examples=120, **_COMMON)
settings.register_profile("long", max_examples=1500, **_COMMON | dict(derandomize=False))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
