"""fork_rng(): seed the global random numbers for a while, and restore them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SeedFunction = Callable[[int], None]


@contextlib.contextmanager
def fork_rng(*devices: torch.device) -> Iterator[SeedFunction]:
    """Yield a function that seeds the global generators of the CPU and the devices. Restore their states on exit.

    Unlike torch.random.fork_rng with torch.manual_seed, this leaves all other devices alone. On a machine without a
    GPU, torch.manual_seed also keeps a stack trace of each call, for the time when CUDA starts.
    """
    sources: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any], Callable[[int], Any]]] = []
    for generator in generators(devices):
        sources.append((generator.get_state, generator.set_state, generator.manual_seed))
    if any(device.type == "mps" for device in devices):
        sources.append((torch.mps.get_rng_state, torch.mps.set_rng_state, torch.mps.manual_seed))
    states = [get_state() for get_state, _, _ in sources]

    def seed(number: int) -> None:
        for _, _, manual_seed in sources:
            manual_seed(number)

    try:
        yield seed
    finally:
        for (_, set_state, _), state in zip(sources, states, strict=True):
            set_state(state)


def generators(devices: tuple[torch.device, ...]) -> Iterator[torch.Generator]:
    """Yield the global generators of the CPU and of these devices."""
    yield torch.default_generator
    for device in devices:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            yield torch.cuda.default_generators[device.index]
