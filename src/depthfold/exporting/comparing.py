"""Does an exported file compute what the network computes?"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from torch import nn

from depthfold.backends.base import Exporter, Inputs, flatten, on_cpu, private_copy, reasons, with_batch
from depthfold.backends.cuda import cuda_settings
from depthfold.errors import VerificationError
from depthfold.merging.comparison import last_digit, output_error
from depthfold.merging.verification import CHAOS, TOLERANCE
from depthfold.tracing import ExampleInputs


def compare(backend: Exporter, module: nn.Module, inputs: Inputs, path: Path, *, dynamic: bool) -> float:
    """The largest error on two random inputs, of two sizes of the batch where the file takes any. Raises if it is more
    than rounding: the tolerance of verify(), or what the network makes of a change in the last digit of its input."""
    module, inputs = private_copy(module, inputs)
    size = len(inputs[0])
    errors = []
    # Neither size is the one that the file was made with: what it takes for a constant would show.
    for seed, batch in enumerate((1, size + 2) if dynamic else (size, size)):
        given = ExampleInputs(with_batch(inputs, batch)).random(seed).args
        wanted = run_in_pytorch(module, given)
        compiled = backend.open(path, given)
        try:
            found = compiled()
        finally:
            compiled.close()
        errors.append(output_error(wanted, found))
        tolerance = TOLERANCE.get(inputs[0].dtype, 1e-4)
        if errors[-1] > tolerance:
            sensitivity = output_error(wanted, run_in_pytorch(module, tuple(map(last_digit, given))))
            tolerance = max(tolerance, CHAOS * sensitivity)
        if not errors[-1] <= tolerance:
            raise VerificationError(
                f"The exported {path.name} does not compute what the network computes: with a batch of {batch} it is "
                f"off by {errors[-1]:.1e} of the largest output, and {tolerance:.1e} is allowed. "
                "Export to another format, and please report the model."
            )
    return max(errors)


def run_in_pytorch(module: nn.Module, given: Inputs) -> Inputs:
    """The outputs in evaluation mode, on the CPU. A graph of torch.fx that fails also prints itself: not to the user,
    who gets the reason."""
    what = f"PyTorch cannot run this module with a batch of {len(given[0])}"
    quiet = contextlib.redirect_stderr(io.StringIO())
    with reasons(what), quiet, torch.inference_mode(), cuda_settings(tf32=False, benchmark=False):
        return tuple(map(on_cpu, flatten(module(*(tensor.clone() for tensor in given)))))
