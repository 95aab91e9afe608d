from __future__ import annotations

import dataclasses

from depthfold.core import fingerprint
from structures import plain_chain


def test_depends_on_the_structure_and_not_on_names() -> None:
    network = plain_chain(3)
    assert fingerprint(network) == fingerprint(dataclasses.replace(network, name="other"))
    others = [plain_chain(4), plain_chain(3, activation=None), dataclasses.replace(network, barriers=(1,))]
    assert len({fingerprint(other) for other in (network, *others)}) == 4
