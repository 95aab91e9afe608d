"""Run a graph node by node, with arguments of the types that its code would pass."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list


class Interpreter(fx.Interpreter):
    """Passes plain lists and dicts to modules. A forward may write to them, but not to those of torch.fx."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return plain(super().fetch_args_kwargs_from_env(n))


def plain(argument: Any) -> Any:
    """Return an argument of a node with plain lists and dicts. Values that modules returned stay as they are."""
    if isinstance(argument, immutable_list):
        return [plain(each) for each in argument]
    if isinstance(argument, immutable_dict):
        return {key: plain(each) for key, each in argument.items()}
    return tuple(map(plain, argument)) if type(argument) is tuple else argument
