"""Peak memory of one forward: weights, activations and whatever the convolutions need besides."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from depthfold.backends.base import in_float32, reasons
from depthfold.backends.torch_run import Place, Precision
from depthfold.core import Environment
from depthfold.core.wording import one_line
from depthfold.errors import DepthfoldError

RUNS = 3


def peak_memory(
    module: nn.Module, inputs: tuple[Tensor, ...], environment: Environment
) -> tuple[int | None, str | None]:
    """Bytes at the highest point of a forward in eager PyTorch, weights included; or None and the reason. On a GPU in
    the precision and layout of the environment, by CUDA's allocator; elsewhere in float32, by a process of its own."""
    try:
        # Where nothing has run on a GPU, it is not asked for its name either: that takes memory of a device that may be
        # in use by others, and fails where none is left.
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_cuda and environment.device == torch.cuda.get_device_name():
            return _on_cuda(_place(environment), module, inputs), None
        return _in_subprocess(*in_float32(module, inputs)), None
    except Exception as error:  # noqa: BLE001 - whatever it is, memory is not worth the rest of a profile
        return None, one_line(error)


def _place(environment: Environment) -> Place:
    """Where the network was timed, as far as eager PyTorch can follow; in float32 if it lacks the precision."""
    known: tuple[Precision, ...] = get_args(Precision)
    precision: Precision = next((each for each in known if each == environment.precision), "float32")
    last = "channels_last=true" in (environment.runtime or "")
    return Place(device="cuda", precision=precision, channels_last=last, threads=None)


def _on_cuda(place: Place, module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    module, inputs = place.moved(module, inputs)
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - _bytes(module, inputs)
    with place.settings():
        module(*inputs)  # tries every algorithm for its convolutions, with memory that no later run needs
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(RUNS):
            module(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def _bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    tensors = (*module.parameters(), *module.buffers(), *inputs)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _in_subprocess(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """The high-water mark of a process that does nothing else: an allocator on a CPU keeps no books."""
    module, inputs = module.cpu(), tuple(tensor.cpu() for tensor in inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.pt2"
        with reasons("torch.export cannot export it for the process that measures it"):
            torch.export.save(torch.export.export(module, inputs), path)
        sizes = [[list(tensor.shape), str(tensor.dtype).split(".")[1]] for tensor in inputs]
        command = [sys.executable, "-m", "depthfold.latency.high_water", str(path), json.dumps(sizes)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = result.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise DepthfoldError(f"the process that measures it ended with code {result.returncode}: {said[0]}")
    return int(result.stdout.strip().splitlines()[-1]) + _bytes(module, inputs)
