"""Counts on real models: those of the paper."""

import pytest
import torch
from torchvision import models

import depthfold as df
import structures

STEM_AND_HEAD = ["features.0.*", "features.18.*"]


def of_structure(network):
    """What both the traced network and the one written by hand know."""
    layers = [(layer.shape, layer.in_size, layer.activation) for layer in network.layers]
    return layers, [(skip.source, skip.target, skip.projection) for skip in network.skips], network.barriers


@pytest.mark.parametrize("width", [1.0, 1.4])
def test_mobilenet_v2_has_the_counts_of_the_paper(width):
    model = models.mobilenet_v2(weights=None, width_mult=width)
    traced = df.trace(model, torch.zeros(1, 3, 64, 64), ignore=STEM_AND_HEAD)
    assert traced.depth == 50
    assert len(traced.spans("paper")) == 171
    assert len(traced.flagged_spans("paper")) == 315
    assert len(traced.flagged_spans("paper", exclusion=False)) == 405
    assert of_structure(traced.network) == of_structure(structures.mobilenet_v2(width, size=32))
    assert traced.network.layers[0].where == "features.1.conv.0.0"
    assert traced.network.layers[0].norm == "features.1.conv.0.1"
    refused = {refusal.where: refusal.code for refusal in traced.network.refusals}
    assert refused["features.0.0"] == refused["features.18.0"] == "ignored"


def test_vgg19_bn_has_36_spans_and_barriers_at_its_pools():
    model = models.vgg19_bn(weights=None, init_weights=False)
    traced = df.trace(model, torch.zeros(1, 3, 32, 32))
    assert (traced.depth, traced.network.barriers, len(traced.spans("paper"))) == (16, (2, 4, 8, 12), 36)
    assert of_structure(traced.network) == of_structure(structures.vgg19())
    assert {refusal.code for refusal in traced.network.refusals if refusal.position} == {"pooling"}
    assert all(flagged.a and flagged.b for flagged in traced.flagged_spans("paper"))


def test_resnet34_without_its_stem_has_62_spans():
    model = models.resnet34(weights=None)
    traced = df.trace(model, torch.zeros(1, 3, 128, 128), ignore=["conv1", "bn1"])
    assert (traced.depth, traced.network.barriers, len(traced.spans("paper"))) == (32, (), 62)
    assert of_structure(traced.network) == of_structure(structures.resnet34())


def test_resnet34_with_its_stem_parts_it_at_the_pool():
    traced = df.trace(models.resnet34(weights=None), torch.zeros(1, 3, 64, 64))
    assert (traced.depth, traced.network.barriers) == (33, (1,))
    assert len(traced.spans("paper")) == 63


def test_printing_a_real_network_names_its_layers_and_its_counts():
    traced = df.trace(models.mobilenet_v2(weights=None), torch.zeros(1, 3, 64, 64), ignore=STEM_AND_HEAD)
    text = str(traced)
    assert text.startswith(
        "MobileNetV2: 50 layers, 33 activations, 10 skips, 0 barriers; 171 spans in the paper's space"
    )
    assert "features.17.conv.2" in text
    assert repr(traced).startswith("<TracedNetwork MobileNetV2: 50 layers")
