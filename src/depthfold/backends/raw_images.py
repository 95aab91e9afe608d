"""Networks that take raw images: uint8 images are normalised inside the network, also in its ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from depthfold.errors import InvalidValue

Layout = Literal["NHWC", "NCHW"]  # the order of batch, height, width and channels
_CHANNELS_FIRST = (0, 3, 1, 2)


def require_layout(value: object) -> Layout:
    if value not in get_args(Layout):
        raise InvalidValue(f"The layout of raw images is NHWC or NCHW, found {value!r}.")
    return value  # type: ignore[return-value]


class RawImages(nn.Module):
    """A network behind the normalisation of its inputs. It takes images of uint8 (0 to 255).

    `mean` and `deviation` have a number for each channel, for values from 0 to 1. The network must take one batch of
    images (N x C x H x W).
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, network: nn.Module, mean: Sequence[float], deviation: Sequence[float], layout: Layout = "NHWC"
    ) -> None:
        super().__init__()
        self.network, self.layout = network, require_layout(layout)
        first = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(()))
        self.dtype = first.dtype
        for name, values in (("mean", mean), ("deviation", deviation)):
            scaled = torch.tensor(values, dtype=torch.float32, device=first.device)[:, None, None] * 255.0
            self.register_buffer(name, scaled)

    def normalised(self, images: Tensor) -> Tensor:
        if self.layout == "NHWC":
            images = images.permute(_CHANNELS_FIRST)
        return ((images.float() - self.mean) / self.deviation).to(self.dtype)

    def forward(self, images: Tensor) -> Any:
        return self.network(self.normalised(images))


def add_normalisation(model: Any, raw: RawImages) -> None:
    """Change the ONNX model of a network so that it takes raw images."""
    import onnx

    graph, helper, kinds = model.graph, onnx.helper, onnx.TensorProto
    source = graph.input[0]
    taken = {name for node in graph.node for name in (*node.input, *node.output)} | {
        tensor.name for tensor in graph.input
    }
    name = "images"
    while any(f"{other}_".startswith(f"{name}_") for other in taken):  # the values below are called images_...
        name = f"raw_{name}"
    batch, *rest = (dim.dim_param or dim.dim_value for dim in source.type.tensor_type.shape.dim)
    sizes = [*rest[1:], rest[0]] if raw.layout == "NHWC" else rest
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if raw.layout == "NHWC":
        steps.append(("Transpose", [], {"perm": list(_CHANNELS_FIRST)}))
    steps.append(("Cast", [], {"to": kinds.FLOAT}))
    for kind, values in (("Sub", raw.mean), ("Div", raw.deviation)):
        steps.append((kind, [f"{name}_{kind.lower()}"], {}))
        array = values.detach().cpu().numpy()[None]
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}_{kind.lower()}"))
    if (wanted := source.type.tensor_type.elem_type) != kinds.FLOAT:
        steps.append(("Cast", [], {"to": wanted}))
    nodes, value = [], name
    for number, (kind, others, attributes) in enumerate(steps):
        result = source.name if number == len(steps) - 1 else f"{name}_{number}"
        nodes.append(helper.make_node(kind, [value, *others], [result], name=f"{kind}_{result}", **attributes))
        value = result
    later = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *later])
    graph.input.remove(source)
    graph.input.insert(0, helper.make_tensor_value_info(name, kinds.UINT8, [batch, *sizes]))
