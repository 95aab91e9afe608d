"""Check the arguments of trace(): the model, the submodule, and the modules to ignore."""

from __future__ import annotations

import contextlib
import copy
import glob
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from depthfold.errors import TraceError
from depthfold.support.text import did_you_mean
from depthfold.tracing.modules import is_hooked
from depthfold.tracing.rules import Ignore, is_ignored
from depthfold.tracing.tracer import describe_error

Model = TypeVar("Model", bound=nn.Module)

# Wrappers, and the attribute that holds the wrapped model.
_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def check_model(model: nn.Module, at: str | None) -> None:
    """Raise TraceError if this is not a module that can be traced, or if it has no submodule `at`."""
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise TraceError(f"trace() takes a torch.nn.Module, found {found}. Load or build the model first.")
    if (wrapper := type(model).__name__) in _WRAPPERS:
        raise TraceError(f"The model is wrapped in {wrapper}. Unwrap it: trace(model.{_WRAPPERS[wrapper]}, ...).")
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(f"torch.fx cannot record a ScriptModule. {_unscripted(model, 'Trace')}")
    for path, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise TraceError(f"{path or type(module).__name__} has no weights yet. Run the model once before trace().")
        # Also outside the traced part: TorchScript's copies of weights cannot be trained or replaced.
        if _has_scripted_weights(module):
            raise TraceError(
                f"{path!r} is a ScriptModule, whose weights a rewritten copy would lose. {_unscripted(module, 'Use')}"
            )
    paths = [path for path, _ in model.named_modules() if path]
    if at and at not in paths:
        name = type(model).__name__
        if first := _first_name(model, at):
            raise TraceError(
                f"{at!r} is the same module as {first!r}, and layers with two names cannot be merged. Delete the "
                f"attribute that the forward of {name} does not use, and trace the other one."
            )
        raise TraceError(f"{name} has no submodule {at!r}. {_hint(at, paths)}")


def _has_scripted_weights(module: nn.Module) -> bool:
    """Return True for a ScriptModule with weights. A frozen one has them as constants, and no training mode."""
    frozen = not hasattr(module, "training")
    return isinstance(module, torch.jit.ScriptModule) and (frozen or bool([*module.parameters(), *module.buffers()]))


def _unscripted(module: nn.Module, verb: str) -> str:
    own = type(module)
    if own.__module__.startswith("torch."):
        return f"{verb} the module from which it was scripted."
    return f"Derive {own.__name__} from torch.nn.Module instead, and remove script_method from its forward."


def _first_name(model: nn.Module, at: str) -> str | None:
    """Return the first name of a module that is registered more than once; None if there is no module `at`."""
    wanted = dict(model.named_modules(remove_duplicate=False)).get(at)
    return next((path for path, module in model.named_modules() if module is wanted), None)


def resolve_ignore(part: nn.Module, given: Ignore | str | type[nn.Module], at: str | None) -> tuple[str, ...]:
    """Return the names and globs of the modules to ignore, with types replaced by names.

    Names may start with `at`. Raise TraceError if a name or glob matches no module.
    """
    paths = [path for path, _ in part.named_modules() if path]
    patterns: list[str] = []
    for pattern in (given,) if isinstance(given, str | type) else given:
        if isinstance(pattern, str):
            pattern = pattern.removeprefix(f"{at}.") if at else pattern
            if not any(is_ignored(path, (pattern,)) for path in paths):
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


def modules_outside(model: nn.Module, at: str | None) -> dict[int, str]:
    """Return the paths of the modules outside the traced part by their ids. A module that is also inside is refused."""
    found: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        around = f"{at}.".startswith(f"{path}.") or not path
        if at and not around and not path.startswith(f"{at}."):
            found.setdefault(id(module), path)
    return found


def copy_model(model: Model, shared: Mapping[int, Any] | None = None) -> Model:
    """Return a copy of the model. Objects in `shared`, by id, are not copied."""
    # Tensors that are computed from others (old-style weight norm) have a gradient history and cannot be copied. Every
    # forward computes them again, so a detached copy suffices.
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    # Python modules, such as a configuration, cannot be copied either, and need not be.
    python = {id(value): value for value in _attributes(model).values() if isinstance(value, ModuleType)}
    memo = {**computed, **python, **(shared or {})}
    try:
        return copy.deepcopy(model, {**memo})
    except Exception as error:
        name = next((name for name, value in _attributes(model).items() if not _copies(value, memo)), None)
        remove = "attributes that cannot be copied, such as cached tensors with gradients or open files"
        raise TraceError(
            f"{type(model).__name__} cannot be copied with copy.deepcopy(): {describe_error(error)}. Remove "
            f"{remove if name is None else f'the attribute {name}, or make it when it is used'}."
        ) from error


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all modules, by their paths."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    }


def _copies(value: Any, memo: Mapping[int, Any]) -> bool:
    with contextlib.suppress(Exception):
        copy.deepcopy(value, {**memo})
        return True
    return False


def refuse_hooks(part: nn.Module, name: str) -> None:
    """Raise TraceError if the traced part itself has forward hooks."""
    if is_hooked(part):
        raise TraceError(
            f"{name} has forward hooks, which a rewritten copy would lose. Remove them before tracing, or trace a "
            'submodule, with at="...".'
        )
