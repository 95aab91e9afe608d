"""All tensors of a module by name: to be written, and to be put in place of those that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under all of their names. A state dict leaves out the buffers that its author thought
    could be computed again; here nobody will."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def without_ties(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor under its first name, and the further names of those that have several."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors(module):
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)], tensors[name] = name, tensor
    return tensors, tied


def put_tensors(module: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put these in the place of the module's own, which may be on the device "meta". All names must be there."""
    made: dict[str, Tensor] = {}
    for name, old in list(named_tensors(module)):
        source = tied.get(name, name)
        if source not in made:
            new = tensors[source]
            made[source] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        owner, _, own = name.rpartition(".")
        place = module.get_submodule(owner)
        (place._parameters if isinstance(old, nn.Parameter) else place._buffers)[own] = made[source]  # type: ignore[assignment]
