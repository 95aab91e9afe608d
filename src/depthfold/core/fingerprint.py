"""What a table remembers of its network, so that a table of another network is noticed."""

from __future__ import annotations

import hashlib
import json

from depthfold.core.document import encode
from depthfold.core.network import Network


def fingerprint(network: Network) -> str:
    """Sixteen hex digits that change with the layers: shapes, sizes, activations, skips, barriers. What stands around
    the layers has no part in it, because tables travel; journals, which do not, ask for that, too.

    Names of modules and the wording of refusals do not count: the same network traced by a newer depthfold keeps its
    tables.
    """
    structure = {
        "layers": [
            (encode(layer.shape), layer.in_size, layer.norm is not None, layer.activation) for layer in network.layers
        ],
        "skips": sorted((s.source, s.target, str(encode(s.projection))) for s in network.skips),
        "barriers": network.barriers,
    }
    return hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()[:16]
