"""Proxies that know their value, so that type checks and in-place writes behave as they do for the value.

torch.fx records a forward by running it on proxies. For the proxies of torch.fx, isinstance(x, Tensor) is False, and
x += y means x = x + y, which is a different computation if a second name refers to x.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import math
import operator
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, ParameterProxy

from depthfold.tracing.interpreter import plain

UNKNOWN = object()  # the value of a proxy whose operation could not be run

# Key in the meta of a node that was an augmented assignment, x += y.
AUGMENTED = "depthfold.augmented"

_RANKS = ("ndim", "dim")  # the number of dimensions does not change with the input
_SIZES = ("shape", "size", "numel", "nelement")


class ValueProxy(fx.Proxy):
    """A proxy with the value that the operation has on the example inputs.

    With `tracer.fixed_sizes`, sizes are numbers instead of proxies.
    """

    tracer: Any

    def __init__(self, node: fx.Node, tracer: Any, value: Any) -> None:
        super().__init__(node, tracer)
        self.value = value

    def __getattr__(self, name: str) -> Any:
        fixed = name in _RANKS or (name in _SIZES and self.tracer.fixed_sizes)
        if fixed and isinstance(self.value, Tensor):
            return getattr(self.value, name)
        if name == "shape":  # unlike an attribute of torch.fx, this proxy knows how many sizes there are
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)

    def __len__(self) -> int:
        if self.tracer.fixed_sizes and isinstance(self.value, Tensor):
            return len(self.value)
        return self._count() or super().__len__()

    def __iter__(self) -> Any:
        # torch.fx inspects the code of its caller, which would be this method.
        count = _unpacked(inspect.currentframe()) or self._count()
        return iter([self[n] for n in range(count)]) if count else super().__iter__()  # type: ignore[index]

    def _count(self) -> int:
        """Return the number of parts of a value that was split, and assert the size that determines it.

        The number of sizes in a shape needs no assertion. Return 0 for other values.
        """
        if isinstance(self.value, torch.Size) and is_shape(self.node):
            return len(self.value)
        name = self.node.target if isinstance(self.node.target, str) else getattr(self.node.target, "__name__", "")
        if name not in ("chunk", "split", "tensor_split") or not isinstance(self.value, tuple | list):
            return 0
        dim = self.node.args[2] if len(self.node.args) > 2 else self.node.kwargs.get("dim", 0)
        whole = self.node.args[0]
        if not isinstance(dim, int) or not isinstance(whole, fx.Node):
            return 0
        self.tracer.assert_size(whole, dim, sum(part.shape[dim] for part in self.value))
        return len(self.value)

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    def __index__(self) -> int:
        return operator.index(self.tracer.number(self, int))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_method", "__setitem__", (self, index, value), {})


def _unpacked(frame: Any) -> int:
    """Return the number of values that the iterating code unpacks, or 0 if it does not unpack."""
    caller = frame.f_back if frame else None
    if caller is None:
        return 0
    instruction = next(step for step in dis.get_instructions(caller.f_code) if step.offset == caller.f_lasti)
    return int(instruction.argval) if instruction.opname == "UNPACK_SEQUENCE" else 0


# What the sizes of a value, and its type and device, can be read from.
SIZES = frozenset({"shape", "ndim", "size", "numel", "dim"})
FLAGS = frozenset(
    {"dtype", "device", "is_cuda", "is_cpu", "is_mps", "requires_grad", "is_floating_point", "is_complex"}
)
_PURE_FUNCTIONS = {
    getattr(module, name) for module in (operator, math) for name in dir(module) if not name.startswith("_")
}
_FLAG_FUNCTIONS = {torch.is_floating_point: "is_floating_point", torch.is_complex: "is_complex"}


def depends_only_on(names: Collection[str], node: fx.Node) -> bool:
    """Return True if a number or flag is computed only from these attributes and methods of values."""
    if node.op == "call_method":
        return node.target in names
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in names or depends_only_on(names, node.all_input_nodes[0])  # x.device.type
    if node.target in _FLAG_FUNCTIONS:
        return _FLAG_FUNCTIONS[node.target] in names
    return node.target in _PURE_FUNCTIONS and all(depends_only_on(names, each) for each in node.all_input_nodes)


def is_shape(node: fx.Node) -> bool:
    """Return True for x.shape, x.size() and slices with constant bounds, whose lengths follow from the rank."""
    if node.target is operator.getitem and len(node.all_input_nodes) == 1:
        return is_shape(node.all_input_nodes[0])
    return node.target == "size" or (node.target is getattr and node.args[1] == "shape")


class Unrecordable(Exception):
    """Raised if a forward does something that a graph cannot represent."""


class WeightProxy(ParameterProxy):
    """The proxy of a parameter."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise Unrecordable("the forward replaces a parameter")
        super().__setattr__(name, value)


# These fail for a proxy as their first argument, but not for a tuple that contains one.
_CREATE_TENSORS = ("empty", "ones", "rand", "randn", "zeros")


@contextlib.contextmanager
def functions_of_values() -> Iterator[None]:
    """Within this context, isinstance(), torch.is_tensor() and torch.jit.isinstance() answer for the value of a proxy.

    The first two do not for calls from PyTorch itself, which would pass the proxy to C++ as a tensor. torch.as_tensor
    does that, so it returns the proxy of a tensor. Functions that create tensors get their sizes as a tuple: torch.fx
    can record that, also without these functions when it unpickles a graph.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (builtins, "isinstance", _isinstance(isinstance)),
        (torch, "is_tensor", _is_tensor(torch.is_tensor)),
        (torch.jit, "isinstance", _isinstance_for_torchscript(torch.jit.isinstance)),
        (torch, "as_tensor", _as_tensor(torch.as_tensor)),
        *((torch, name, _created(getattr(torch, name))) for name in _CREATE_TENSORS),
    ]
    original = [getattr(module, name) for module, name, _ in replaced]
    try:
        for module, name, function in replaced:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(replaced, original, strict=True):
            setattr(module, name, function)


def _isinstance(original: Any) -> Any:
    def answer(one: Any, kinds: Any) -> bool:
        if original(one, kinds):
            return True
        kind = _value_type(one)
        return kind is not None and not _is_torch(sys._getframe(1)) and issubclass(kind, kinds)

    return answer


def _is_tensor(original: Any) -> Any:
    def answer(one: Any) -> bool:
        return original(one) or (_value_type(one) is not None and not _is_torch(sys._getframe(1)))

    return answer


def _isinstance_for_torchscript(original: Any) -> Any:
    def answer(one: Any, kind: Any) -> Any:
        with contextlib.suppress(LookupError):
            one = value_of(one)
        return original(one, kind)

    return answer


def _as_tensor(original: Any) -> Any:
    def convert(data: Any, dtype: Any = None, device: Any = None) -> Any:
        if _value_type(data) is None:
            return original(data, dtype=dtype, device=device)
        given = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
        return data.to(**given) if given else data

    return convert


def _created(original: Any) -> Any:
    def create(*sizes: Any, **named: Any) -> Any:
        if not sizes or not isinstance(sizes[0], fx.Proxy):
            return original(*sizes, **named)
        with contextlib.suppress(LookupError):
            if isinstance(value := value_of(sizes[0]), tuple):
                shape: Any = sizes[0]
                sizes = tuple(shape[n] for n in range(len(value)))
        return original(sizes, **named)

    return create


def _value_type(one: Any) -> type | None:
    """Return the type of a proxy's value, or None if this is not the proxy of a tensor."""
    if type(one) is WeightProxy:
        return nn.Parameter
    return Tensor if type(one) is ValueProxy and issubclass(type(one.value), Tensor) else None


def _is_torch(frame: Any) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == "torch" or name.startswith(("torch.", "depthfold.tracing"))


def value_of(argument: Any) -> Any:
    """Return an argument with every proxy replaced by its value. Raise LookupError if a value is unknown."""
    return plain(torch.fx.node.map_aggregate(argument, _value))


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, fx.Proxy):
        return leaf
    if isinstance(leaf, ParameterProxy):
        return leaf.param
    if isinstance(leaf, Attribute):
        return getattr(_value(leaf.root), leaf.attr)
    value = leaf.value if isinstance(leaf, ValueProxy) else UNKNOWN
    if value is UNKNOWN:
        raise LookupError(leaf.node.name)
    return value


# The method that x += y calls on a tensor. An operator would be lost in pickling, because torch.fx then records the
# generated code again with its own proxies.
_METHODS = {
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "ipow": "pow_",
    "iand": "bitwise_and_",
    "ior": "bitwise_or_",
    "ixor": "bitwise_xor_",
}


def _augmented(name: str) -> Any:
    plain = getattr(operator, name[1:] if name not in ("iand", "ior") else f"{name[1:]}_")

    def write(self: ValueProxy, other: Any) -> Any:
        if not isinstance(self.value, Tensor):  # numbers and tuples are immutable
            return plain(self, other)
        proxy = self.tracer.create_proxy("call_method", _METHODS[name], (self, other), {})
        proxy.node.meta[AUGMENTED] = plain
        return proxy

    return write


for _name in _METHODS:
    setattr(ValueProxy, f"__{_name}__", _augmented(_name))
