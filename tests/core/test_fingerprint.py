from __future__ import annotations

import dataclasses

from depthfold.core import Skip
from structures import mobilenet_v2, plain_chain


def test_depends_on_the_structure_and_not_on_names() -> None:
    network = plain_chain(3)
    assert network.fingerprint == dataclasses.replace(network, name="other").fingerprint
    others = [plain_chain(4), plain_chain(3, activation=None), dataclasses.replace(network, barriers=(1,))]
    assert len({other.fingerprint for other in (network, *others)}) == 4


def test_depends_on_the_size_of_the_maps_and_on_skips() -> None:
    small, large = mobilenet_v2(size=32), mobilenet_v2(size=64)
    assert [layer.shape for layer in small.layers] == [layer.shape for layer in large.layers]
    assert small.fingerprint != large.fingerprint
    plain = plain_chain(3)
    skips = [Skip(source=source, target=target, where="add") for source, target in ((0, 2), (1, 3), (0, 3))]
    others = [dataclasses.replace(plain, skips=(skip,)) for skip in skips]
    projected = dataclasses.replace(skips[0], projection=plain.layers[0].shape)
    others.append(dataclasses.replace(plain, skips=(projected,)))
    assert len({other.fingerprint for other in (plain, *others)}) == 5
    assert small.fingerprint == dataclasses.replace(small, skips=small.skips[::-1]).fingerprint
