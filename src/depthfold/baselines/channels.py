"""Networks with fewer channels: given widths, a uniform width, and AMC's published widths. Needs Torch-Pruning."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from depthfold.backends import backend_errors
from depthfold.backends.base import flatten
from depthfold.errors import InvalidValue
from depthfold.support.coerce import as_float
from depthfold.support.optional import load
from depthfold.support.text import did_you_mean
from depthfold.tracing import ExampleInputs

# The channels of MobileNetV2-1.0 that AMC changes, and those that it leaves of them for 70 % of the FLOPs: of the stem,
# of the first convolutions of blocks 1..16, of the last block and of the last convolution.
MOBILENET_V2 = (32, 96, 144, 144, 192, 192, 192, 384, 384, 384, 384, 576, 576, 576, 960, 960, 960, 320, 1280)
AMC = (24, 72, 104, 104, 136, 136, 136, 272, 272, 272, 272, 408, 400, 400, 712, 720, 712, 248, 848)


def narrow(model: nn.Module, example: Any, widths: Mapping[str, int]) -> nn.Module:
    """Return a copy of the model in which each named convolution has only this many output channels.

    The channels that stay have the largest L1 norm: the sum of the absolute weights that compute them. Everything that
    reads or adds these channels gets narrower with them. Of convolutions whose outputs are added, name only one; their
    norms are added. The model must return tensors of the same shapes as before, and grouped convolutions, other than
    depth-wise ones, must keep their channels.
    """
    pruning = load("torch_pruning", "baselines")
    model = trainable_copy(model)
    inputs = ExampleInputs.of(example).like(model).args
    graph, shapes = _dependency_graph(model, inputs), output_shapes(model, inputs)
    for name, width in widths.items():
        conv, prune = _convolution(model, name), pruning.prune_conv_out_channels
        if not 0 < width <= conv.out_channels:
            raise InvalidValue(f"{name!r} has {conv.out_channels} output channels and cannot get {width}.")
        if width == conv.out_channels:
            continue
        whole = graph.get_pruning_group(conv, prune, list(range(conv.out_channels)))
        _check_can_be_narrowed(name, whole, conv.out_channels)
        norms = [
            dependency.target.module.weight.detach().abs().sum((1, 2, 3))[channels]
            for dependency, channels in whole
            if dependency.handler == prune  # not depth-wise ones, nor those that read the channels
        ]
        order = torch.stack(norms).sum(0).argsort(stable=True)
        graph.get_pruning_group(conv, prune, order[: len(order) - width].tolist()).prune()
    if (found := output_shapes(model, inputs)) != shapes:
        raise InvalidValue(
            f"With fewer channels, the shape of the output changes from {shapes} to {found}. Name only convolutions "
            "that do not compute the output."
        )
    return model


def _check_can_be_narrowed(name: str, group: Any, channels: int) -> None:
    for dependency, indices in group:
        part = dependency.target.module
        if not isinstance(part, nn.Conv2d):
            continue  # others may have an index for each pixel, as after a flatten
        if 1 < part.groups < part.out_channels:
            raise InvalidValue(
                f"The channels of {name!r} belong to a convolution with {part.groups} groups, which cannot get "
                "narrower. Name other convolutions."
            )
        if len(indices) != channels:
            raise InvalidValue(
                f"The channels of {name!r} are joined or split, so that they cannot be removed one by one. Name other "
                "convolutions."
            )


def _convolution(model: nn.Module, name: str) -> nn.Conv2d:
    parts = {name: part for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}
    if name not in parts:
        raise InvalidValue(f"The model has no 2-D convolution {name!r}. {did_you_mean(name, parts)}".rstrip())
    return parts[name]


def output_shapes(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
    with torch.no_grad():
        return [tuple(tensor.shape) for tensor in flatten(model(*inputs))]


def _dependency_graph(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return Torch-Pruning's graph of which layers share channels."""
    pruning = load("torch_pruning", "baselines")
    with backend_errors("Torch-Pruning cannot follow the channels of this model"):  # for example, those of a shuffle
        return pruning.DependencyGraph().build_dependency(model, example_inputs=inputs)


def trainable_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode whose gradients Torch-Pruning can follow."""
    return copy.deepcopy(model).eval().requires_grad_()


def uniform_width(model: nn.Module, example: Any, ratio: float, *, layers: Iterable[str] | None = None) -> nn.Module:
    """Return a copy of the model in which convolutions have only this ratio of their output channels, rounded.

    `layers` are the convolutions to make narrower, for example the first ones of all inverted residual blocks, as in
    the paper. By default they are all, except those that compute the output of the model. Convolutions whose outputs
    are added keep the same channels, and depth-wise ones those of their inputs. The channels with the largest L1 norm
    stay.
    """
    if not 0 < as_float("The ratio of channels", ratio, InvalidValue) <= 1:
        raise InvalidValue(f"The ratio of channels must be above 0 and at most 1, found {ratio}.")
    names = _one_of_each_group(model, example) if layers is None else list(layers)
    widths = {name: max(1, round(ratio * _convolution(model, name).out_channels)) for name in names}
    return narrow(model, example, widths)


def _one_of_each_group(model: nn.Module, example: Any) -> list[str]:
    """Return the first convolution of each group that shares its channels, without the output of the model."""
    model = trainable_copy(model)
    inputs = ExampleInputs.of(example).like(model).args
    kept = output_layers(model, inputs)
    groups = _dependency_graph(model, inputs).get_all_groups(ignored_layers=kept, root_module_types=[nn.Conv2d])
    names = {part: name for name, part in model.named_modules()}
    return [names[group[0].dep.target.module] for group in groups]


def output_layers(model: nn.Module, inputs: tuple[Any, ...]) -> list[nn.Module]:
    """Return the convolutions and linear layers whose output the model returns, so that it must keep its channels."""
    outputs: dict[nn.Module, Any] = {}
    hooks = [
        part.register_forward_hook(lambda part, _, output: outputs.__setitem__(part, output))
        for part in model.modules()
        if isinstance(part, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        returned = {id(tensor) for tensor in flatten(model(*inputs))}
    for hook in hooks:
        hook.remove()
    return [part for part, output in outputs.items() if id(output) in returned]


def amc_mobilenet_v2(model: nn.Module, example: Any) -> nn.Module:
    """Return a copy of a MobileNetV2-1.0 with the channels that AMC published for 70 % of its FLOPs.

    It has 210.6 million multiply-adds at 224x224 and 1000 classes. The channels with the largest L1 norm stay.
    """
    channels = {name: part.out_channels for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}
    names = list(channels)
    changed = [*names[:1], *names[3:51:3], *names[50:]]
    if len(names) != 52 or tuple(channels[name] for name in changed) != MOBILENET_V2:
        raise InvalidValue(
            f"AMC's channels are for MobileNetV2 of width 1.0, whose 52 convolutions have {MOBILENET_V2[0]}, ..., "
            f"{MOBILENET_V2[-1]} channels. This model has {len(names)} with {channels[names[0]]}, ..., "
            f"{channels[names[-1]]} channels."
        )
    return narrow(model, example, dict(zip(changed, AMC, strict=True)))
