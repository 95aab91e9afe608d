"""Who else uses a module: a module that is used in two places cannot be changed for the sake of one."""

from __future__ import annotations

from collections import Counter

from torch import fx


def count_calls(graph: fx.GraphModule) -> Counter[int]:
    """How often each module is called, by its id: also inside another one that we do not look into."""
    called = (graph.get_submodule(str(node.target)) for node in graph.graph.nodes if node.op == "call_module")
    return Counter(id(part) for module in called for part in module.modules())


def read_by_code(graph: fx.GraphModule) -> set[str]:
    """The paths of the modules whose parameters, or those of modules inside, the code reads itself."""
    targets = (str(node.target).split(".") for node in graph.graph.nodes if node.op == "get_attr")
    return {".".join(names[:n]) for names in targets for n in range(1, len(names))}
