"""Recognise known modules. Classes of timm, torchvision and detectron2 are recognised by name, without an import.

A subclass, or another class with one of these names, may compute anything. So a module counts as known only if its
forward method is a known one.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.prune import BasePruningMethod

from depthfold.algebra import NormStatistics

CONVOLUTIONS: tuple[type[_ConvNd], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ZERO_PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.RReLU: "rrelu",
    nn.PReLU: "prelu",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardtanh: "hardtanh",
    nn.Sigmoid: "sigmoid",
    nn.LogSigmoid: "logsigmoid",
    nn.Tanh: "tanh",
    nn.Tanhshrink: "tanhshrink",
    nn.Softplus: "softplus",
    nn.Softsign: "softsign",
    nn.Softshrink: "softshrink",
    nn.Hardshrink: "hardshrink",
    nn.Threshold: "threshold",
}

# Modules that do nothing in evaluation.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NO_OPS = (nn.Identity, *_DROPOUTS)

_NO_OP_MARK = "depthfold_no_op"

# Classes of timm, torchvision and detectron2.
_RANDOM_DROPS = {"DropPath", "StochasticDepth", "DropBlock2d", "DropBlock3d"}
_FROZEN_NORMS = {"FrozenBatchNorm2d", "FrozenBatchNormAct2d"}
_NORMS_WITH_ACTIVATION = {"BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d"}


def called_module(graph: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return the module that a node calls, or None if it does not call one."""
    return graph.get_submodule(str(node.target)) if node.op == "call_module" else None


def activation_kind(module: nn.Module) -> str | None:
    """Return the kind of an element-wise activation, or None if the module is not one."""
    if type(module) in ACTIVATIONS:
        return ACTIVATIONS[type(module)]
    if type(module).__module__.startswith("timm.layers.activations"):
        return type(module).__name__.lower()
    return None


def _is_one_of(module: nn.Module, names: Set[str]) -> bool:
    """Return True if this is a module of timm, torchvision or detectron2 with one of these class names."""
    own = type(module)
    return own.__name__ in names and own.__module__.partition(".")[0] in ("timm", "torchvision", "detectron2")


def is_no_op(module: nn.Module) -> bool:
    """Return True if the module returns its input unchanged in evaluation."""
    inherited = any(isinstance(module, base) and type(module).forward is base.forward for base in _NO_OPS)
    return inherited or _is_one_of(module, _RANDOM_DROPS) or getattr(module, _NO_OP_MARK, False)


def mark_no_op(module: nn.Module) -> None:
    """Mark an unknown module that returned its input when it was recorded. Copies of the module keep the mark."""
    setattr(module, _NO_OP_MARK, True)


def is_hooked(module: nn.Module) -> bool:
    """Return True if the module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_hooked_inside(module: nn.Module) -> bool:
    """Return True if the module or one inside it has forward hooks."""
    return any(is_hooked(part) for part in module.modules())


# The classes of PyTorch's old-style hooks, and the functions that remove them.
_REMOVAL = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}


def weight_hook_removal(module: nn.Module) -> str | None:
    """Return the call that removes a hook of PyTorch that computes the module's weights, or None without one."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            return f"torch.nn.utils.prune.remove(module, {hook._tensor_name!r})"
        if call := _REMOVAL.get(type(hook).__name__):
            return f"torch.nn.utils.{call}(module)"
    return None


def is_plain(module: nn.Module) -> bool:
    """Return True if the module has no hooks and its forward was not replaced on the object."""
    return not (is_hooked_inside(module) or "forward" in vars(module))


def is_batch_norm(module: nn.Module) -> bool:
    """Return True if the module is a batch norm, even one with an unknown forward."""
    return isinstance(module, _BatchNorm) or _is_one_of(module, _FROZEN_NORMS)


def fused_activation(module: nn.Module) -> nn.Module | None:
    """Return the activation inside a batch norm of timm that applies one, or None."""
    if not _is_one_of(module, _NORMS_WITH_ACTIVATION):
        return None
    inner = getattr(module, "act", None)
    return inner if isinstance(inner, nn.Module) and not isinstance(inner, nn.Identity) else None


def computes_batch_norm(module: nn.Module) -> bool:
    """Return True if the forward of this batch norm is a known one."""
    if "forward" in vars(module):  # replaced on the object
        return False
    if _is_one_of(module, _FROZEN_NORMS | _NORMS_WITH_ACTIVATION):
        return True
    return type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def plain_batch_norm(module: nn.Module) -> Any:
    """Return the class of PyTorch that is equivalent to this batch norm for the same inputs, or None."""
    if not (is_batch_norm(module) and computes_batch_norm(module)):
        return None
    if _is_one_of(module, _FROZEN_NORMS | _NORMS_WITH_ACTIVATION):
        return nn.BatchNorm2d
    for base in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        if isinstance(module, base):
            return base if type(module)._check_input_dim is base._check_input_dim else None
    return None  # it may take inputs of any size


def computes_convolution(module: nn.Module) -> bool:
    """Return True if the module is a convolution with the forward of PyTorch."""
    for base in CONVOLUTIONS:
        if isinstance(module, base):
            own = type(module)
            replaced = "forward" in vars(module) or "_conv_forward" in vars(module)
            return not replaced and own.forward is base.forward and own._conv_forward is base._conv_forward
    return False


def is_container(module: nn.Module) -> bool:
    """Return True if the module only calls its children one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def is_atomic(module: nn.Module) -> bool:
    """Return True if the module is recognised as a whole, so that tracing must not look inside."""
    return (
        computes_convolution(module)
        or isinstance(module, TRANSPOSED)
        or (is_batch_norm(module) and computes_batch_norm(module))
        or activation_kind(module) is not None
        or is_no_op(module)
        or is_hooked(module)  # a graph of its operations would not call the hooks
    )


def is_leaf(module: nn.Module) -> bool:
    """Return True if a recording calls the module instead of looking inside."""
    builtin = type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)
    return builtin or is_atomic(module)


def norm_statistics(module: nn.Module) -> NormStatistics:
    """Return the statistics and parameters of a batch norm of any class."""

    def tensor(name: str) -> Tensor | None:
        value = getattr(module, name, None)
        return value if isinstance(value, Tensor) else None

    mean, variance = tensor("running_mean"), tensor("running_var")
    assert mean is not None and variance is not None  # tracing refuses batch norms without statistics
    return NormStatistics(mean, variance, tensor("weight"), tensor("bias"), float(module.eps))  # type: ignore[arg-type]
