"""A module as an ONNX model: the road to every runtime but PyTorch's own.

PyTorch's exporter takes more than a second for a single convolution and about ten for a MobileNetV2, and a latency
table needs a hundred of the one and twenty of the other. So the vocabulary of plain CNNs is written directly
(`onnx_writer.py`: milliseconds, and half a second). Whatever has a word that is not in it goes through the exporter.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from depthfold.backends.base import Inputs, dynamic_shapes, flatten, private_copy, reasons, with_batch
from depthfold.backends.onnx_words import UnknownWord
from depthfold.backends.onnx_writer import write_model
from depthfold.core.optional import load
from depthfold.errors import BackendError

_LIMIT = 2**31 - 1  # bytes of a protocol buffer


def onnx_bytes(module: nn.Module, inputs: Inputs, extra: str = "onnx", dynamic_batch: bool = False) -> bytes:
    """The module for these inputs as a serialised ONNX model, for batches of any size if asked for."""
    load("onnx", extra)
    module, inputs = private_copy(module, inputs)
    module, inputs = module.cpu(), tuple(tensor.cpu() for tensor in inputs)
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if size >= _LIMIT:
        raise BackendError(
            f"The weights take {size / 2**30:.1f} GiB; an ONNX model in memory holds less than 2 GiB. Measure with "
            "the backend pytorch or inductor, and export to .pt2."
        )
    outputs = _run(module, inputs)
    try:
        larger = _run(module, with_batch(inputs, len(inputs[0]) + 1)) if dynamic_batch else None
        model: Any = write_model(module, inputs, outputs, larger)
    except UnknownWord:
        load("onnxscript", extra)
        model = exported(module, inputs, dynamic_batch)
    with reasons("The ONNX model cannot be serialised"):
        return bytes(model.SerializeToString())


def _run(module: nn.Module, inputs: Inputs) -> Inputs:
    batch = inputs[0].shape[0] if inputs[0].dim() else 1
    with reasons(f"PyTorch cannot run this module with a batch of {batch}"), torch.inference_mode():
        return flatten(module(*(tensor.clone() for tensor in inputs)))


def exported(module: nn.Module, inputs: Inputs, dynamic_batch: bool = False) -> Any:
    """By PyTorch's exporter. Its advice to developers is not for the users of a runtime."""
    with reasons("PyTorch cannot export this module to ONNX"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = dynamic_shapes(inputs) if dynamic_batch else None
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, dynamic_shapes=shapes)
        if program is None:
            raise BackendError("PyTorch's exporter to ONNX gave no model. Measure with pytorch, export to .pt2.")
        return program.model_proto
