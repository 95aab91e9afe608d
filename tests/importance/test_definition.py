"""The definition of importance (Eq. 14), compared with an independent computation."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.core import FlaggedSpan
from depthfold.errors import PlanError
from depthfold.importance import importance_plan, importance_student, measure_importance
from depthfold.training import derive_seed, train
from tiny_importance import ACTIVATIONS, RECIPE, Tiny, TinyTask, batch, holdout_score, tiny_network

NETWORK = tiny_network()


class ByHand(nn.Module):
    """Tiny with the given activations, and the padding of the block (i, j] before its first layer."""

    def __init__(self, i, j, activations, seed=None):
        super().__init__()
        self.net, self.i, self.j, self.activations = Tiny(), i, j, activations
        if seed is not None:  # layer j is reinitialised
            torch.manual_seed(seed)
            old = getattr(self.net, f"conv{j}")
            sizes = old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding
            setattr(self.net, f"conv{j}", nn.Conv2d(*sizes, bias=old.bias is not None))
            setattr(self.net, f"norm{j}", nn.BatchNorm2d(old.out_channels))

    def layer(self, l, x):
        conv, norm = getattr(self.net, f"conv{l}"), getattr(self.net, f"norm{l}")
        padding = conv.padding[0]
        if self.i < l <= self.j:
            # Layers 1 to 4 pad by 1, layer 5 not at all, and before layer 4 nothing has a stride.
            padding = min(self.j, 4) - self.i if l == self.i + 1 and self.i < 4 else 0
        return norm(F.conv2d(x, conv.weight, conv.bias, conv.stride, padding))

    def forward(self, x):
        x = self.layer(1, x)
        if 1 in self.activations:
            x = F.relu(x)
        shortcut = x
        x = self.layer(2, x)
        if 2 in self.activations:
            x = F.relu(x)
        x = self.layer(3, x)
        # Both have the same centre. If a block starts at the shortcut, the shortcut has no padding yet.
        margin = (x.shape[-1] - shortcut.shape[-1]) // 2
        x = x + F.pad(shortcut, (margin,) * 4)
        if 3 in self.activations:
            x = F.relu(x)
        x = self.layer(4, x)
        if 4 in self.activations:
            x = F.relu(x)
        x = self.layer(5, x)
        if 5 in self.activations:
            x = F.relu(x)
        return self.net.head(x.mean((2, 3)))


def trained_by_hand(model, seed):
    """Train with Nesterov momentum and a cosine learning rate."""
    momentum = {}
    model.train()
    for number in range(RECIPE.steps):
        lr = RECIPE.lr * 0.5 * (1 + math.cos(math.pi * number / RECIPE.steps))
        x, y = batch(seed, number)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad + RECIPE.weight_decay * parameter
                momentum[parameter] = RECIPE.momentum * momentum.get(parameter, 0) + gradient
                parameter -= lr * (gradient + RECIPE.momentum * momentum[parameter])
    return model.eval()


def by_hand(key, seed):
    i, j, a, b = key
    fresh = derive_seed(seed, "reset", (i, j, bool(a), bool(b))) if j == i + 1 else None
    return ByHand(i, j, ACTIVATIONS[key], fresh)


def close(found, wanted, tolerance):
    """Return True if no parameter or buffer differs by more than the tolerance."""
    assert found.keys() == wanted.keys()
    return all((found[name] - wanted[name]).abs().max() <= tolerance for name in wanted)


def test_flagged_spans_are_those_derived_by_hand():
    assert {(s.i, s.j, int(s.a), int(s.b)) for s in NETWORK.flagged_spans()} == set(ACTIVATIONS)


@pytest.mark.parametrize("key", ACTIVATIONS, ids=str)
def test_activations_padding_and_reinitialised_layers(key):
    block, (i, j, _, _) = FlaggedSpan(*key), key
    assert importance_plan(NETWORK.network, block).activations == ACTIVATIONS[key]
    seed = 123
    student = importance_student(NETWORK, block, seed)
    reference = ByHand(i, j, ACTIVATIONS[key], seed if j == i + 1 else None)
    found = student.state_dict()
    assert close(found, reference.net.state_dict(), 0.0)
    changed = {name for name, value in Tiny().state_dict().items() if not torch.equal(found[name], value)}
    reset = {f"norm{j}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    reset |= {f"conv{j}.weight"} | ({"conv2.bias"} if j == 2 else set())
    assert changed == (reset if j == i + 1 else set())
    x, _ = batch(0, 99)
    for mode in (True, False):  # in training, batch norms also see the moved padding
        torch.testing.assert_close(student.train(mode)(x), reference.train(mode)(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("key", ACTIVATIONS, ids=str)
def test_trained_weights_match_training_by_hand(key):
    seed = 9
    student = importance_student(
        NETWORK, FlaggedSpan(*key), derive_seed(seed, "reset", (*key[:2], *map(bool, key[2:])))
    )
    trained = train(student, TinyTask(), RECIPE, seed=seed)
    reference = trained_by_hand(by_hand(key, seed), seed)
    assert close(student.state_dict(), reference.net.state_dict(), 1e-6)
    assert trained.score == pytest.approx(holdout_score(reference), abs=1e-6)


def test_layers_that_share_weights_with_a_reinitialised_layer_keep_them():
    model = Tiny()
    model.conv3.weight, model.norm3.weight = model.conv2.weight, model.norm2.weight
    traced = df.trace(model, batch(0, 0)[0])
    before = copy.deepcopy(traced.graph.state_dict())
    student = importance_student(traced, FlaggedSpan(1, 2, True, True), seed=0)
    alone = importance_student(NETWORK, FlaggedSpan(1, 2, True, True), seed=0)
    for name, tensor in student.state_dict().items():
        own = name.startswith(("conv2", "norm2"))
        assert torch.equal(tensor, alone.state_dict()[name] if own else before[name]), name
        assert not (own and torch.equal(tensor, before[name])), name
    assert student.conv2.weight.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in traced.graph.state_dict().items())
    # Without reinit, the weights stay shared.
    kept = importance_student(traced, FlaggedSpan(1, 2, True, True), seed=0, reinit=False)
    assert kept.conv3.weight is kept.conv2.weight


def test_frozen_parameters_and_statistics_are_not_reinitialised():
    model = Tiny()
    model.norm2.eval().bias.requires_grad_(False)
    model.conv2.weight.requires_grad_(False)
    traced = df.trace(model, batch(0, 0)[0])
    student = importance_student(traced, FlaggedSpan(1, 2, True, True), seed=0)
    found, before = student.state_dict(), model.state_dict()
    assert {name for name in before if not torch.equal(found[name], before[name])} == {"conv2.bias", "norm2.weight"}
    # If the whole model is in evaluation mode, the norm is trained.
    model.eval()
    student = importance_student(df.trace(model, batch(0, 0)[0]), FlaggedSpan(1, 2, True, True), seed=0)
    assert torch.equal(student.norm2.running_mean, torch.zeros(4))


def test_norm_that_the_user_froze_is_not_trained():
    model = Tiny()
    model.norm2.eval()
    sent = pickle.loads(pickle.dumps(df.trace(model, batch(0, 0)[0])))  # as a worker receives it
    student = importance_student(sent, FlaggedSpan(0, 3, True, True), seed=0)
    train(student, TinyTask(), RECIPE)
    assert student.norm2.num_batches_tracked.item() == 7
    assert student.norm3.num_batches_tracked.item() == 7 + RECIPE.steps
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(student.norm2, name), getattr(Tiny().norm2, name))


def test_importance_is_score_minus_base_on_the_holdout_set(tmp_path):
    before, draws = copy.deepcopy(NETWORK.graph.state_dict()), torch.get_rng_state()
    table = measure_importance(NETWORK, TinyTask(folder=str(tmp_path)), RECIPE, method="trained")
    assert torch.equal(torch.get_rng_state(), draws)
    base = holdout_score(Tiny().eval())
    assert table.base == pytest.approx(base, abs=1e-6)
    assert len(table.entries) == len(ACTIVATIONS)
    for span, importance in table.importances.items():
        key = (span.i, span.j, int(span.a), int(span.b))
        score = holdout_score(trained_by_hand(by_hand(key, RECIPE.seed), RECIPE.seed))
        assert importance == pytest.approx(score - base, abs=1e-6)
    assert len(set(table.importances.values())) == len(ACTIVATIONS)  # all different, so that swapped entries would fail
    assert table.network == "Tiny"
    assert table.fingerprint == NETWORK.network.fingerprint
    assert "tiny; seeds 5; " in table.provenance
    assert close(NETWORK.graph.state_dict(), before, 0.0)


def test_block_without_the_last_activation_is_refused():
    traced = df.trace(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()), torch.zeros(1, 2, 3, 3))
    with pytest.raises(PlanError, match=r"no activation after the last layer, 1, .* Leave this block out of the table"):
        importance_plan(traced.network, FlaggedSpan(0, 1, True, False))
