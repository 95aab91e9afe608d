"""Networks and tables that several tests share. No torch: everything is built from the nouns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from depthfold.core import (
    ConvShape,
    FlaggedSpan,
    ImportanceTable,
    LatencyTable,
    Layer,
    Network,
    Score,
    Skip,
    Span,
    Timing,
)

# Expansion, output channels, blocks, stride of the first block: the table of the MobileNetV2 paper.
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2() -> Network:
    """The 50 numbered layers of MobileNetV2 at width 1.0 and input 224: all but the stem and the head."""
    layers: list[Layer] = []
    skips: list[Skip] = []
    channels, size = 32, (112, 112)

    def add(out: int, kernel: int, stride: int, groups: int, activation: str | None) -> None:
        nonlocal channels, size
        shape = ConvShape(
            in_channels=channels,
            out_channels=out,
            kernel=(kernel, kernel),
            stride=(stride, stride),
            padding=((kernel // 2, kernel // 2),) * 2,
            dilation=(1, 1),
            groups=groups,
        )
        where = f"layer{len(layers) + 1}"
        layers.append(
            Layer(where=where, shape=shape, in_size=size, out_size=shape.out_size(size), activation=activation)
        )
        channels, size = out, shape.out_size(size)

    for expansion, out, blocks, first_stride in MOBILENET_V2:
        for block in range(blocks):
            start, before, hidden = len(layers), channels, channels * expansion
            stride = first_stride if block == 0 else 1
            if expansion != 1:
                add(hidden, 1, 1, 1, "relu6")
            add(hidden, 3, stride, hidden, "relu6")
            add(out, 1, 1, 1, None)
            if stride == 1 and before == out:
                skips.append(Skip(source=start, target=len(layers), where=f"block{len(skips)}"))
    return Network(name="mobilenet_v2", layers=tuple(layers), skips=tuple(skips))


def chain(depth: int, activation: str | None = "relu") -> Network:
    """A plain chain of 3x3 layers."""
    shape = ConvShape(
        in_channels=8, out_channels=8, kernel=(3, 3), stride=(1, 1), padding=((1, 1),) * 2, dilation=(1, 1)
    )
    layer = {"shape": shape, "in_size": (16, 16), "out_size": (16, 16), "activation": activation}
    return Network(name="chain", layers=tuple(Layer(where=f"layer{l}", **layer) for l in range(1, depth + 1)))


def latency_table(times: dict[tuple[int, int], float], **fields: object) -> LatencyTable:
    return LatencyTable(entries=tuple(Timing(span=Span(*ends), time=time) for ends, time in times.items()), **fields)


def importance_table(values: dict[tuple[int, int, int, int], float], **fields: object) -> ImportanceTable:
    entries = tuple(Score(span=FlaggedSpan(*key), samples=(value,)) for key, value in values.items())
    return ImportanceTable(entries=entries, **fields)


def plausible_tables(
    spans: Iterable[Span], blocks: Iterable[FlaggedSpan], seed: int
) -> tuple[LatencyTable, ImportanceTable]:
    """Random real tables that pull against each other as measured ones do: merging saves time and costs accuracy.

    Such tables have much longer frontiers than independent random numbers, where long spans win both ways.
    """
    rng = random.Random(seed)
    single = [rng.uniform(0.2, 1.2) for _ in range(1000)]
    damage = [rng.uniform(0.0, 0.02) for _ in range(1000)]
    times = {(s.i, s.j): sum(single[s.i : s.j]) * (rng.uniform(0.35, 1.2) if len(s) > 1 else 1.0) for s in spans}
    values = {
        (f.i, f.j, f.a, f.b): rng.gauss(0.003 * (f.a + f.b), 0.002) - rng.uniform(0.5, 1.5) * sum(damage[f.i + 1 : f.j])
        for f in blocks
    }
    return latency_table(times), importance_table(values)


def small_instance(seed: int) -> tuple[LatencyTable, ImportanceTable]:
    """Up to 9 layers, every kind of trouble: the seed decides which."""
    rng = random.Random(seed)
    depth = rng.randint(1, 9)
    density = rng.choice((1.0, 0.7, 0.4))
    barriers = {p for p in range(1, depth) if rng.random() < 0.25} if rng.random() < 0.5 else set()
    spans = [
        (i, j)
        for i in range(depth)
        for j in range(i + 1, depth + 1)
        if not any(i < p < j for p in barriers) and (j == i + 1 or rng.random() < density)
    ]
    if rng.random() < 0.15 and depth > 1:
        spans.remove(rng.choice([ends for ends in spans if ends[1] == ends[0] + 1 and ends[1] < depth]))
    flags = _flags(rng, depth, barriers, extended=rng.random() < 0.6)
    value = _values(rng)
    times = {ends: abs(value()) if rng.random() > 0.1 else 0.0 for ends in spans}
    blocks = [(i, j, a, b) for i, j in spans for a in flags[i] for b in flags[j]]
    if rng.random() < 0.3:  # the exclusion rule of the paper's space, and entries that somebody left out
        firsts = {block[:2]: block for block in blocks}
        blocks = [block for block in blocks if block in firsts.values() or rng.random() < 0.7]
    shift = rng.choice((0.0, 3.0, 3.0, -3.0))  # 3: every block is a gain, so that latency and importance conflict
    latency, importance = latency_table(times), importance_table({block: value() + shift for block in blocks})
    return (_untimed(rng, latency), importance) if rng.random() < 0.2 else (latency, importance)


def _flags(rng: random.Random, depth: int, barriers: set[int], extended: bool) -> list[tuple[int, ...]]:
    """Which flags a position may have: its own activation stays, a bare barrier stays bare, elsewhere both."""
    flags: list[tuple[int, ...]] = [(1,)]
    for p in range(1, depth + 1):
        bare = extended and rng.random() < 0.6
        flags.append(((0,) if p in barriers or rng.random() < 0.2 else (0, 1)) if bare else (1,))
    return flags


def _values(rng: random.Random) -> Callable[[], float]:
    """Real numbers, or small whole and quarter numbers with many ties, whose sums are exact."""
    return rng.choice((lambda: rng.uniform(-2, 2), lambda: float(rng.randint(-3, 3)), lambda: rng.randint(-8, 8) / 4))


def _untimed(rng: random.Random, latency: LatencyTable) -> LatencyTable:
    """Some entries lose their time and get a reason instead."""
    entries = [
        Timing(span=entry.span, reason="out of memory") if rng.random() < 0.1 and len(entry.span) > 1 else entry
        for entry in latency.entries
    ]
    return LatencyTable(entries=tuple(entries))
