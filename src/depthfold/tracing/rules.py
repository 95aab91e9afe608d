"""Rules for modules that cannot be merged. Each rule returns a reason or None."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from depthfold.tracing.functional import FunctionalConv
from depthfold.tracing.modules import (
    computes_batch_norm,
    computes_convolution,
    is_hooked_inside,
    weight_hook_removal,
)

Reason = tuple[str, str]  # (code, sentence)
Ignore = Iterable[str | type[nn.Module]]


@dataclass(frozen=True, slots=True)
class Site:
    """One call of a module."""

    module: nn.Module
    calls: int
    rank: int | None  # the number of dimensions of its input, including batch and channels
    elsewhere: str | None = None  # its path outside the traced part, if it has one
    read: bool = False  # True if other code reads its parameters
    around: str = ""  # the path in the model of the outermost submodule around it that is called as often


def is_ignored(path: str, ignore: Iterable[str]) -> bool:
    """Return True if a name or glob matches the path of this module or of one around it."""
    parts = path.split(".")
    around = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore for name in around)


def _shared(site: Site) -> Reason | None:
    if site.calls > 1:
        alone = f"; to merge it, trace {site.around} alone: at= (--submodule)" if site.around else ""
        return "used-twice", f"it is called {site.calls} times, so its weights cannot be merged into one place{alone}"
    if site.elsewhere:
        return "used-twice", f"the model also has it as {site.elsewhere}; delete that attribute if nothing uses it"
    return None


def _parametrised(site: Site) -> Reason | None:
    if parametrize.is_parametrized(site.module):
        name = next(iter(site.module.parametrizations))  # type: ignore[arg-type]
        call = f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r})"
        return "parametrised", f"its {name} is computed from other tensors; {call} makes it a plain parameter"
    return None


def _hooked(site: Site) -> Reason | None:
    if not is_hooked_inside(site.module):
        return None
    if call := weight_hook_removal(site.module):
        return "hooked", f"a hook computes its weights; {call} makes them plain parameters"
    return "hooked", "it has forward hooks, which a merged layer would lose"


def _read_elsewhere(site: Site) -> Reason | None:
    if site.read:
        return "weights-read", "other code reads its parameters, which merging would remove"
    return None


def _replaced(site: Site) -> Reason | None:
    if "forward" in vars(site.module):
        return "custom", f"the forward of this {type(site.module).__name__} was replaced on the object"
    return None


def _custom_convolution(site: Site) -> Reason | None:
    if not computes_convolution(site.module):
        return "custom-convolution", f"{type(site.module).__name__} defines its own forward"
    return None


def _pads(conv: Any) -> bool:
    """Return True unless a convolution whose padding mode is not "zeros" has a padding of 0."""
    given = conv.padding
    widths = [k - 1 for k in conv.kernel_size] if given == "same" else [] if given == "valid" else given
    # In these modes, PyTorch does not read `padding`, but widths that it computed from it when the module was made.
    return any(widths) or any(conv._reversed_padding_repeated_twice)


def _padding_mode(site: Site) -> Reason | None:
    conv: Any = site.module
    if (mode := conv.padding_mode) != "zeros" and _pads(conv):
        return ("padding-mode", f"its padding mode is {mode!r}, but only zero padding can move to the front of a span")
    return None


def _precision(site: Site) -> Reason | None:
    weight = site.module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return "precision", "its weights are not real floating-point numbers"
    return None


def _rank(site: Site) -> Reason | None:
    assert isinstance(site.module, _ConvNd | FunctionalConv)
    expected = len(site.module.kernel_size) + 2
    if site.rank != expected:
        return "unbatched", f"its input has {site.rank} dimensions instead of {expected}; add a batch dimension"
    return None


def _custom_norm(site: Site) -> Reason | None:
    if not computes_batch_norm(site.module):
        return "custom-norm", f"{type(site.module).__name__} defines its own forward"
    return None


def _statistics(site: Site) -> Reason | None:
    if getattr(site.module, "running_mean", None) is None or getattr(site.module, "running_var", None) is None:
        return "batch-statistics", "this batch norm has no running statistics, so it depends on its input"
    return None


_COMMON: tuple[Callable[[Site], Reason | None], ...] = (_parametrised, _shared, _hooked, _read_elsewhere)
PLAIN = (_hooked, _replaced)  # for all other modules
CONVOLUTION = (*_COMMON, _custom_convolution, _padding_mode, _precision, _rank)
FUNCTIONAL = (_rank,)  # their weights stay in the user's modules
NORM = (*_COMMON, _custom_norm, _statistics)


def first_reason(rules: Iterable[Callable[[Site], Reason | None]], site: Site) -> Reason | None:
    """Return the reason of the first rule that applies, or None."""
    return next((reason for rule in rules if (reason := rule(site))), None)
