"""The caller's settings of precision, which must not change what depthfold computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from depthfold.backends.cuda import cuda_settings


@contextlib.contextmanager
def disable_autocast(device: torch.device) -> Iterator[None]:
    """Disable the caller's autocast, so that it does not change the precision of a check or a training run.

    The cache of cast weights is cleared on entry and exit, because weights may change inside.
    """
    with contextlib.ExitStack() as stack:
        # Only if one is enabled: otherwise the task's own autocast stays the outermost one, which clears the cache
        # when it ends.
        for device_type in sorted({"cpu", device.type}):
            if torch.is_autocast_enabled(device_type):
                stack.callback(torch.clear_autocast_cache)
                stack.enter_context(torch.autocast(device_type, enabled=False))
                torch.clear_autocast_cache()
        yield


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes of the tensors. TF32 and autocast round to three digits or fewer, which hides errors."""
    with cuda_settings(tf32=False, benchmark=False), disable_autocast(device):
        yield
