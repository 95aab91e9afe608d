"""Conversion of modules to ONNX, directly from a torch.fx graph if all operations are supported.

PyTorch's exporter takes more than 1 s for one convolution and about 10 s for MobileNetV2, and a latency table needs
about a hundred convolutions and twenty networks. So plain CNNs are written directly, which takes 25 ms and 0.6 s.
Anything that is not supported exactly (`onnx_ops.py`) raises UnsupportedOp, and PyTorch's exporter is used instead.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from depthfold.backends.base import (
    Inputs,
    backend_errors,
    batched,
    dynamic_shapes,
    flatten,
    private_copy,
    quiet,
    raise_interruption,
    with_batch,
)
from depthfold.backends.onnx_ops import CALLS, MODULES, UnsupportedOp
from depthfold.backends.precision import disable_autocast
from depthfold.backends.raw_images import RawImages, add_normalisation
from depthfold.errors import BackendError
from depthfold.support.optional import load

Shape = list[int | str]  # the name of a dynamic size

_OPSET, _IR = 18, 10
_SIZE_QUERIES = ("size", getattr)
_NO_OPERATIONS = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ELEMENTWISE = ("Relu", "Clip", "Sigmoid", "HardSwish", "HardSigmoid", "Mul")
_INPLACE = (operator.iadd, "add_", "relu_")


def write_model(module: nn.Module, inputs: Inputs, outputs: Inputs, larger: Inputs | None = None) -> Any:
    """Return a module in evaluation mode as an onnx.ModelProto for inputs of exactly these sizes.

    `outputs` are the outputs of the module. If `larger`, the outputs for a batch with one more item, are given, the
    model accepts batches of any size.
    """
    try:
        traced = fx.symbolic_trace(nn.Sequential(module) if type(module) in MODULES else module)
        with torch.inference_mode():
            found = flatten(traced(*(tensor.clone() for tensor in inputs)))
    except Exception as error:  # tracing the user's forward may raise anything
        raise UnsupportedOp(f"cannot be traced: {error}") from error
    _remove_assertions(traced)
    # Tracing turns x += y into x + y, which differs if x is read again.
    if len(found) != len(outputs) or not all(map(_close, found, outputs)):
        raise UnsupportedOp("the traced graph computes something else")
    if len({tensor.dtype for tensor in (*inputs, *outputs, *traced.parameters())}) > 1:
        raise UnsupportedOp("mixed dtypes")
    if inputs[0].dtype not in (torch.float16, torch.float32, torch.float64):
        raise UnsupportedOp("a dtype that NumPy does not have")
    dynamic = batched(inputs) if larger is not None else (False,) * len(inputs)
    sources: list[Shape] = [
        ["batch" if has else t.shape[0], *t.shape[1:]] for t, has in zip(inputs, dynamic, strict=True)
    ]
    targets = [
        _dynamic_shape(a.shape, b.shape, len(inputs[0])) for a, b in zip(outputs, larger or outputs, strict=True)
    ]
    return _Writer(traced, inputs, sources, targets).model()


def _remove_assertions(traced: fx.GraphModule) -> None:
    """Remove assertions about the inputs: the file accepts only the sizes that it was written for."""
    for node in reversed(list(traced.graph.nodes)):
        helper = node.target in _SIZE_QUERIES or getattr(node.target, "__module__", "") == "_operator"
        if node.target is torch._assert or (helper and not node.users):
            traced.graph.erase_node(node)


def _dynamic_shape(shape: Sequence[int], larger: Sequence[int], batch: int) -> Shape:
    """Return the shape with "batch" in place of the sizes that grow with the batch."""
    grown = [(a, b) for a, b in zip(shape, larger, strict=False) if a != b]
    if len(shape) != len(larger) or set(grown) - {(batch, batch + 1)}:
        raise UnsupportedOp("a size that is computed from the batch")
    return [a if a == b else "batch" for a, b in zip(shape, larger, strict=True)]


def _close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-4, atol=1e-5, equal_nan=True)


class _Writer:
    """Writes a graph in one pass. `names` maps nodes to ONNX values; identities share the value of their input."""

    def __init__(self, traced: fx.GraphModule, inputs: Inputs, sources: list[Shape], targets: list[Shape]) -> None:
        import onnx

        self.onnx, self.traced, self.inputs = onnx, traced, inputs
        self.sources, self.targets = sources, targets
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.names: dict[fx.Node, str] = {}
        self.taken = {node.name for node in traced.graph.nodes}  # weights have a dot or a space in their names
        self.flat: set[str] = set()  # values with two dimensions
        self.views: set[str] = set()  # values that share memory with another one

    def model(self) -> Any:
        helper = self.onnx.helper
        kind = helper.np_dtype_to_tensor_dtype(self.inputs[0].numpy().dtype)
        rest = list(self.sources)
        sources: list[Any] = []
        targets: list[Any] = []
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if not rest:
                    raise UnsupportedOp("an argument without an example input")
                sources.append(helper.make_tensor_value_info(node.name, kind, rest.pop(0)))
                self.names[node] = node.name
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                if len(results) != len(self.targets):
                    raise UnsupportedOp("an output that is not a tensor")
                for n, (result, shape) in enumerate(zip(results, self.targets, strict=True)):
                    # A new name, because an output must not also be an input or another output.
                    name = self.emit("Identity", (self.read(result),), self.unused(f"output_{n}"))
                    targets.append(helper.make_tensor_value_info(name, kind, shape))
            else:
                self.names[node] = self.write(node)
        if rest:
            raise UnsupportedOp("more example inputs than arguments")
        graph = helper.make_graph(self.nodes, "depthfold", sources, targets, list(self.weights.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)

    def write(self, node: fx.Node) -> str:
        if node.op == "call_module":
            module = self.traced.get_submodule(str(node.target))
            if module._forward_hooks or module._forward_pre_hooks:
                raise UnsupportedOp("a module with hooks")
            if getattr(module, "inplace", False):
                self.check_only_reader(node)
            if len(node.args) != 1 or node.kwargs:
                raise UnsupportedOp(f"{type(module).__name__} with other arguments")
            if type(module) in _NO_OPERATIONS:
                return self.read(node.args[0])
            operation = MODULES.get(type(module))
            if operation is None:
                raise UnsupportedOp(type(module).__name__)
            return operation(self, node, module)
        operation = CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
        if operation is None:
            raise UnsupportedOp(str(node.target))
        if node.kwargs.get("inplace") or node.target in _INPLACE:
            self.check_only_reader(node)
        named = {name: value for name, value in node.kwargs.items() if name != "inplace"}
        try:
            signature(operation).bind(self, node, *node.args, **named)
        except TypeError as error:  # an argument that is not supported
            raise UnsupportedOp(f"{node.target} with other arguments") from error
        return operation(self, node, *node.args, **named)

    def check_only_reader(self, node: fx.Node) -> None:
        """Refuse an in-place operation on a value that is read elsewhere, because ONNX has none."""
        value: Any = node.args[0] if node.args else None
        if not isinstance(value, fx.Node) or len(value.users) != 1 or value.op == "placeholder":
            raise UnsupportedOp("an in-place operation")
        if self.names[value] != value.name or value.name in self.views:
            raise UnsupportedOp("an in-place operation on a view")

    @property
    def dims(self) -> int:
        return self.inputs[0].dim()

    def read(self, value: Any) -> str:
        if not isinstance(value, fx.Node):
            raise UnsupportedOp(f"{value!r} where a tensor is expected")
        return self.names[value]

    def unused(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

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


_LIMIT = 2**31 - 1  # bytes in a protocol buffer


@disable_autocast(torch.device("cpu"))
def onnx_bytes(module: nn.Module, inputs: Inputs, extra: str = "onnx", dynamic_batch: bool = False) -> bytes:
    """Return the module as a serialised ONNX model for these inputs or, with `dynamic_batch`, for any batch."""
    load("onnx", extra)
    module, inputs = private_copy(module, inputs)
    module, inputs = module.cpu(), tuple(tensor.cpu() for tensor in inputs)
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if size >= _LIMIT:
        raise BackendError(
            f"The weights take {size / 2**30:.1f} GiB, and an ONNX model must be smaller than 2 GiB. Measure with the "
            "backend pytorch or inductor, and export to .pt2."
        )
    if isinstance(module, RawImages):  # the same model as without them, behind the normalisation
        model = _onnx_model(module.network, (module.normalised(*inputs),), extra, dynamic_batch)
        add_normalisation(model, module)
    else:
        model = _onnx_model(module, inputs, extra, dynamic_batch)
    with backend_errors("The ONNX model cannot be serialised"):
        return bytes(model.SerializeToString())


def _onnx_model(module: nn.Module, inputs: Inputs, extra: str, dynamic_batch: bool) -> Any:
    output = _run(module, inputs)
    try:
        larger = flatten(_run(module, with_batch(inputs, len(inputs[0]) + 1))) if dynamic_batch else None
        model = write_model(module, inputs, flatten(output), larger)
    except UnsupportedOp:
        load("onnxscript", extra)
        # A wrapper changes the names of the weights, so it is used only if it is needed.
        plain = all(leaf is None or isinstance(leaf, Tensor) for leaf in tree_leaves(output))
        model = export_with_pytorch(module if plain else _OnlyTensors(module), inputs, dynamic_batch)
    if _has_names(output):
        _name_outputs(model, list(_paths(output)))
    return model


def _has_names(output: Any) -> bool:
    """Return True if a forward returns a dict or a named tuple, at the top or inside."""
    if isinstance(output, Mapping) or hasattr(output, "_fields"):
        return True
    return isinstance(output, tuple | list) and any(map(_has_names, output))


def _paths(output: Any) -> Iterator[str]:
    """Yield the place of every tensor in the output of a forward, in the order of flatten(): keys, fields, indices."""
    if isinstance(output, Mapping):
        items = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        items = list(zip(getattr(output, "_fields", map(str, range(len(output)))), output, strict=True))
    else:
        if isinstance(output, Tensor):
            yield ""
        return
    for name, value in items:
        yield from (f"{name}.{rest}" if rest else name for rest in _paths(value))


def _name_outputs(model: Any, paths: Sequence[str]) -> None:
    """Give outputs that a forward returns in a dict or a named tuple the names that they have there."""
    graph = model.graph
    if len(graph.output) != len(paths):
        return
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    import onnx

    for output, path in zip(graph.output, paths, strict=True):
        name = path or "output"
        if output.name == name:
            continue
        while name in taken:
            name += "_"
        taken.add(name)
        graph.node.append(onnx.helper.make_node("Identity", [output.name], [name], name=f"Identity_{name}"))
        output.name = name


class _OnlyTensors(nn.Module):
    """A module that returns the tensors of another one, because PyTorch's exporter takes no numbers and no text."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # With the signature of the module's forward, after which the exporter names the inputs.
        self.forward = functools.wraps(module.forward)(lambda *inputs: flatten(module(*inputs)))


def _run(module: nn.Module, inputs: Inputs) -> Any:
    batch = inputs[0].shape[0] if inputs[0].dim() else 1
    with backend_errors(f"PyTorch cannot run this module with a batch of {batch}"), torch.inference_mode():
        return module(*(tensor.clone() for tensor in inputs))


def export_with_pytorch(module: nn.Module, inputs: Inputs, dynamic_batch: bool = False) -> Any:
    """Return an onnx.ModelProto from PyTorch's exporter. Its warnings are for developers and are not shown."""
    with backend_errors("PyTorch cannot export this module to ONNX"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes, handled = dynamic_shapes(inputs) if dynamic_batch else None, sys.exception()
        try:
            program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, dynamic_shapes=shapes)
        except torch.onnx.OnnxExporterError as error:
            raise_interruption(error, handled)
            raise _first_cause(error) from None  # the message of the exporter starts with advice for developers
        if program is None:
            raise BackendError("PyTorch's ONNX exporter returned no model. Measure with pytorch, and export to .pt2.")
        return program.model_proto


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
