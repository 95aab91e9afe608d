"""The table that a person reads when a network is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from depthfold.core.wording import text_table

if TYPE_CHECKING:
    from depthfold.core.network import Network

HEADER = ("l", "layer", "convolution", "in", "activation", "note")


def network_table(network: Network) -> str:
    """Layers line by line, then the counts and the refusals by kind."""
    lines = [f"{network.name}: {summary(network)}"]
    if network.layers:
        lines += ["", *text_table(HEADER, [_row(network, l) for l in range(1, network.depth + 1)])]
    if network.refusals:
        lines += ["", "What does not merge, and why:"]
        lines += [f"  {line}" for line in refusals_by_kind(network)]
    if network.fixed_padding:
        lines += ["", "Padding that depends on the size of the map, fixed at the traced size:"]
        lines += [f"  {fixed}" for fixed in network.fixed_padding]
    return "\n".join(lines)


def summary(network: Network) -> str:
    if not network.layers:
        return "nothing to merge: no convolution of this network can be a layer"
    spans = {space: len(network.spans(space)) for space in ("paper", "full")}
    text = (
        f"{_count(network.depth, 'layer')}, {_count(len(network.activations), 'activation')}, "
        f"{_count(len(network.skips), 'skip')}, {_count(len(network.barriers), 'barrier')}; "
        f"{_count(spans['paper'], 'span')} in the paper's space, {spans['full']} in the full one"
    )
    return text if spans["full"] > network.depth else text + "; nothing to merge: every chain has a single layer"


def refusals_by_kind(network: Network, shown: int = 3) -> Iterator[str]:
    """One line per kind of refusal, the most frequent first, with a few of the places."""
    for code, count in Counter(refusal.code for refusal in network.refusals).most_common():
        of_kind = [refusal for refusal in network.refusals if refusal.code == code]
        places = ", ".join(dict.fromkeys(refusal.where for refusal in of_kind[:shown]))
        more = f" and {count - shown} more" if count > shown else ""
        yield f"{code} x{count}: {of_kind[0].why} [{places}{more}]"


def _row(network: Network, l: int) -> tuple[str, ...]:
    layer = network.layers[l - 1]
    notes = [f"+ {skip.source}{' through ' + str(skip.projection) if skip.projection else ''}"
             for skip in network.skips_into(l)]  # fmt: skip
    if l in network.barriers:
        kinds = dict.fromkeys(refusal.code for refusal in network.refusals if refusal.position == l)
        notes.append("barrier" + (f" ({', '.join(kinds)})" if kinds else ""))
    size = "x".join(map(str, layer.in_size))
    return (str(l), layer.where, str(layer.shape), size, layer.activation or "-", "; ".join(notes))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
