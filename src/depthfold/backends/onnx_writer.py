"""ONNX written directly from a torch.fx graph, in the vocabulary of `onnx_words.py`.

Everything here is exact or not at all: a word, an option or a module that is not known raises UnknownWord, and the
caller takes PyTorch's exporter instead.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn

from depthfold.backends.base import Inputs, batched, dynamic_shapes, flatten, private_copy, reasons, with_batch
from depthfold.backends.onnx_ops import CALLS, MODULES, UnknownWord
from depthfold.errors import BackendError
from depthfold.support.optional import load

Shape = list[int | str]  # a size that is open has a name

_OPSET, _IR = 18, 10
_OF_SIZES = ("size", getattr)
_IDLE = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ELEMENTWISE = ("Relu", "Clip", "Sigmoid", "HardSwish", "HardSigmoid", "Mul")
_INPLACE = (operator.iadd, "add_", "relu_", "clamp_", "mul_")


def write_model(module: nn.Module, inputs: Inputs, outputs: Inputs, larger: Inputs | None = None) -> Any:
    """An onnx.ModelProto of a module in evaluation mode, for inputs of exactly these sizes; `outputs` are its own.

    With `larger`, the outputs for a batch of one more, it takes batches of any size: no word holds the batch.
    """
    try:
        traced = fx.symbolic_trace(nn.Sequential(module) if type(module) in MODULES else module)
        with torch.inference_mode():
            found = flatten(traced(*(tensor.clone() for tensor in inputs)))
    except Exception as error:  # the user's own forward may raise anything when it is traced
        raise UnknownWord(f"cannot be traced: {error}") from error
    _take_out_assertions(traced)
    # Tracing turns x += y into x + y, which is another thing where somebody else reads x.
    if len(found) != len(outputs) or not all(map(_same, found, outputs)):
        raise UnknownWord("what was traced computes something else")
    if len({tensor.dtype for tensor in (*inputs, *outputs, *traced.parameters())}) > 1:
        raise UnknownWord("mixed types")
    if inputs[0].dtype not in (torch.float16, torch.float32, torch.float64):
        raise UnknownWord("a type that NumPy does not have")
    open_batch = batched(inputs) if larger is not None else (False,) * len(inputs)
    sources: list[Shape] = [
        ["batch" if has else t.shape[0], *t.shape[1:]] for t, has in zip(inputs, open_batch, strict=True)
    ]
    targets = [_open(a.shape, b.shape, len(inputs[0])) for a, b in zip(outputs, larger or outputs, strict=True)]
    return _Writer(traced, inputs, sources, targets).model()


def _take_out_assertions(traced: fx.GraphModule) -> None:
    """Drop what the module asserts about its inputs: the file takes inputs of exactly the sizes that it ran on."""
    for node in reversed(list(traced.graph.nodes)):
        computes = node.target in _OF_SIZES or getattr(node.target, "__module__", "") == "_operator"
        if node.target is torch._assert or (computes and not node.users):
            traced.graph.erase_node(node)


def _open(shape: Sequence[int], larger: Sequence[int], batch: int) -> Shape:
    """A shape in which the sizes that grow with the batch have its name."""
    grown = [(a, b) for a, b in zip(shape, larger, strict=False) if a != b]
    if len(shape) != len(larger) or set(grown) - {(batch, batch + 1)}:
        raise UnknownWord("a size that is computed from the batch")
    return [a if a == b else "batch" for a, b in zip(shape, larger, strict=True)]


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-4, atol=1e-5, equal_nan=True)


class _Writer:
    """One pass over the graph. `names` is the ONNX value of each node; a node that does nothing shares its input's."""

    def __init__(self, traced: fx.GraphModule, inputs: Inputs, sources: list[Shape], targets: list[Shape]) -> None:
        import onnx

        self.onnx, self.traced, self.inputs = onnx, traced, inputs
        self.sources, self.targets = sources, targets
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.names: dict[fx.Node, str] = {}
        self.flat: set[str] = set()  # values that are known to have two dimensions
        self.views: set[str] = set()  # values that share their memory with another one

    def model(self) -> Any:
        helper = self.onnx.helper
        kind = helper.np_dtype_to_tensor_dtype(self.inputs[0].numpy().dtype)
        rest = list(self.sources)
        sources: list[Any] = []
        targets: list[Any] = []
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if not rest:
                    raise UnknownWord("an argument without an example")
                sources.append(helper.make_tensor_value_info(node.name, kind, rest.pop(0)))
                self.names[node] = node.name
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                if len(results) != len(self.targets):
                    raise UnknownWord("an output that is no tensor")
                for n, (result, shape) in enumerate(zip(results, self.targets, strict=True)):
                    # A name of its own: an output that is also an input, or twice an output, would be no valid graph.
                    self.emit("Identity", (self.read(result),), f"output_{n}")
                    targets.append(helper.make_tensor_value_info(f"output_{n}", kind, shape))
            else:
                self.names[node] = self.word(node)
        if rest:
            raise UnknownWord("more examples than arguments")
        graph = helper.make_graph(self.nodes, "depthfold", sources, targets, list(self.weights.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)

    def word(self, node: fx.Node) -> str:
        if node.op == "call_module":
            module = self.traced.get_submodule(str(node.target))
            if module._forward_hooks or module._forward_pre_hooks:
                raise UnknownWord("a module with hooks")
            if getattr(module, "inplace", False):
                self.check_only_reader(node)
            if type(module) in _IDLE:
                return self.read(node.args[0])
            write = MODULES.get(type(module))
            if write is None or len(node.args) != 1 or node.kwargs:
                raise UnknownWord(type(module).__name__)
            return write(self, node, module)
        write = CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
        if write is None:
            raise UnknownWord(str(node.target))
        if node.kwargs.get("inplace") or node.target in _INPLACE:
            self.check_only_reader(node)
        named = {name: value for name, value in node.kwargs.items() if name != "inplace"}
        try:
            signature(write).bind(self, node, *node.args, **named)
        except TypeError as error:  # an argument that the word does not know
            raise UnknownWord(f"{node.target} with other arguments") from error
        return write(self, node, *node.args, **named)

    def check_only_reader(self, node: fx.Node) -> None:
        """Refuse operations in place on values that others may read: in ONNX nothing changes in place."""
        value: Any = node.args[0] if node.args else None
        if not isinstance(value, fx.Node) or len(value.users) != 1 or value.op == "placeholder":
            raise UnknownWord("an operation in place")
        if self.names[value] != value.name or value.name in self.views:
            raise UnknownWord("an operation in place on what may be a part of another value")

    @property
    def dims(self) -> int:
        return self.inputs[0].dim()

    def read(self, value: Any) -> str:
        if not isinstance(value, fx.Node):
            raise UnknownWord(f"{value!r} where a tensor is expected")
        return self.names[value]

    def emit(self, kind: str, sources: Sequence[str], name: str, **attributes: Any) -> str:
        if kind in _ELEMENTWISE and sources[0] in self.flat:
            self.flat.add(name)
        self.nodes.append(self.onnx.helper.make_node(kind, list(sources), [name], name=f"{kind}_{name}", **attributes))
        return name

    def weight(self, name: str, tensor: Tensor) -> str:
        if name not in self.weights:
            self.weights[name] = self.onnx.numpy_helper.from_array(tensor.detach().contiguous().numpy(), name)
        return name

    def constant(self, values: float | Sequence[int]) -> str:
        tensor = torch.tensor(values, dtype=self.inputs[0].dtype if isinstance(values, float) else torch.int64)
        return self.weight(f"constant {values}", tensor)


# A module as an ONNX model: the road to every runtime but PyTorch's own.
#
# PyTorch's exporter takes more than a second for a single convolution and about ten for a MobileNetV2, and a latency
# table needs a hundred of the one and twenty of the other. So the vocabulary of plain CNNs is written directly
# (`onnx_writer.py`: milliseconds, and half a second). Whatever has a word that is not in it goes through the exporter.

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
