"""What the user asks of trace(): the model, the part of it, and what to leave alone, each checked."""

from __future__ import annotations

import copy
import glob
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthfold.errors import TraceError
from depthfold.support.text import did_you_mean
from depthfold.tracing.modules import is_hooked
from depthfold.tracing.rules import Ignore, ignored
from depthfold.tracing.tracer import explain

# Wrappers that have no convolutions of their own, and where the model is inside them.
_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def check_model(model: nn.Module, at: str | None) -> None:
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise TraceError(f"trace() takes a torch.nn.Module, found {found}. Load or build the model first.")
    if (wrapper := type(model).__name__) in _WRAPPERS:
        raise TraceError(f"The model is wrapped in {wrapper}. Take it off: trace(model.{_WRAPPERS[wrapper]}, ...).")
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("The model is a ScriptModule, which torch.fx cannot record. Trace the module it was made of.")
    paths = [path for path, _ in model.named_modules() if path]
    if at and at not in paths:
        raise TraceError(f"{type(model).__name__} has no submodule {at!r}. {_hint(at, paths)}")


def check_ignore(part: nn.Module, given: Ignore | str | type[nn.Module], at: str | None) -> tuple[str, ...]:
    """Return what to leave alone, by name: a type stands for all modules of that type, with what is inside them. A
    name or glob that matches nothing is an error. Names may start with `at`."""
    paths = [path for path, _ in part.named_modules() if path]
    patterns: list[str] = []
    for pattern in (given,) if isinstance(given, str | type) else given:
        if isinstance(pattern, str):
            pattern = pattern.removeprefix(f"{at}.") if at else pattern
            if not any(ignored(path, (pattern,)) for path in paths):
                raise TraceError(
                    f"ignore={pattern!r} matches no module of {type(part).__name__}. {_hint(pattern, paths)}"
                )
            patterns.append(pattern)
        elif isinstance(pattern, type) and issubclass(pattern, nn.Module):
            patterns += (
                glob.escape(path) for path, module in part.named_modules() if path and isinstance(module, pattern)
            )
        else:
            raise TraceError(f"ignore takes names, globs and module types, found {pattern!r}.")
    return tuple(dict.fromkeys(patterns))


def _hint(wrong: str, paths: Sequence[str]) -> str:
    if hint := did_you_mean(wrong, paths, most=3):
        return hint.rstrip()
    return f"It has {', '.join(paths[:8])}, ..." if paths else "It has no submodules."


def modules_outside(model: nn.Module, at: str | None) -> Iterator[int]:
    """The ids of the modules around the traced part: one that is both outside and inside is used twice."""
    for path, module in model.named_modules(remove_duplicate=False):
        around = f"{at}.".startswith(f"{path}.") or not path
        if at and not around and not path.startswith(f"{at}."):
            yield id(module)


def copy_model(model: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy of the model. What `shared` holds, by its id, is not copied."""
    # Weights that are computed from others (old-style weight norm) have a history, which copying refuses. They are
    # computed again in every forward, so their present value is enough.
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(model, {**computed, **(shared or {})})
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be copied: {explain(error)}. depthfold works on a copy, so that your model "
            "stays as it is: take off what copy.deepcopy() cannot copy (cached tensors with gradients, open files)."
        ) from error


def refuse_hooks(part: nn.Module, name: str) -> None:
    if is_hooked(part):
        raise TraceError(
            f"{name} has forward hooks of its own, which a rewritten copy would lose. Take them off before tracing, or "
            'trace the part inside it, with at="...".'
        )
