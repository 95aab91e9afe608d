"""DepthShrinker's search: what the gates compute, their gradients, and which blocks the search removes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.baselines import COSTS, inverted_residuals, plan_without, search_depthshrinker
from depthfold.baselines.search import Gates, _checked_costs, _gated
from depthfold.errors import InvalidValue
from depthfold.training import FunctionTask, capture
from depthfold.vision import import_timm, import_torchvision
from small_training import Recorder
from structures import mobilenet_v2
from tables import plausible_tables


class Residual(nn.Module):
    """Two convolutions with an in-place functional activation between and after them."""

    def __init__(self, channels=4):
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return F.relu_(x + self.two(F.relu_(self.one(x))))


class Inverted(nn.Module):
    """An inverted residual block with trained PReLUs."""

    def __init__(self, channels=4):
        super().__init__()
        hidden = 3 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.PReLU(hidden),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden), nn.PReLU(hidden),
            nn.Conv2d(hidden, channels, 1),
        )  # fmt: skip
        for part in self.body:
            if isinstance(part, nn.PReLU):
                nn.init.uniform_(part.weight)

    def forward(self, x):
        return x + self.body(x)


def torchvision():
    model = import_torchvision().models.mobilenet_v2(weights=None, width_mult=0.25, num_classes=3)
    traced = df.trace(model.double(), torch.randn(2, 3, 32, 32).double())
    return traced, inverted_residuals(traced.network)


def timm():
    """Its activations are inside its batch norms."""
    model = import_timm().create_model("mobilenetv2_035", num_classes=3)
    traced = df.trace(model.double(), torch.randn(2, 3, 32, 32).double())
    return traced, inverted_residuals(traced.network)


def functional():
    """The blocks end in an activation of the network."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Residual(), Residual(), Residual())
    return df.trace(model.double(), torch.randn(2, 3, 8, 8).double()), (df.Span(1, 3), df.Span(5, 7))


def part_of_a_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Inverted(), Inverted(), Inverted()), nn.Flatten())
    traced = df.trace(model.double(), torch.randn(2, 3, 8, 8).double(), at="1")
    return traced, inverted_residuals(traced.network)


NETWORKS = [torchvision, timm, functional, part_of_a_model]


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("kept", [None, 1])
def test_network_with_gates_computes_what_its_plan_computes(make, kept):
    """The plan has all cuts here, so that no padding moves."""
    torch.manual_seed(0)
    traced, spans = make()
    kept = len(spans) if kept is None else kept
    gates = Gates([0.0] * len(spans), kept).double()
    with torch.no_grad():
        gates.values += torch.rand(len(spans))
    student = _gated(traced, spans, gates).eval()
    removed = [span for span, on in zip(spans, gates().tolist(), strict=True) if not on]
    assert len(removed) == len(spans) - kept
    plan = plan_without(traced.network, removed)
    expected = df.rewrite(traced, df.Plan(plan.activations, traced.vanilla.cuts)).eval()
    x = torch.randn(2, 3, 32, 32).double()
    with torch.no_grad():
        assert torch.equal(student(x), expected(x))
        if removed:
            assert not torch.allclose(student(x), df.rewrite(traced, traced.vanilla).eval()(x))


@pytest.mark.parametrize("make", [functional, part_of_a_model])
def test_gradient_of_a_gate_is_that_of_its_decision(make, monkeypatch):
    torch.manual_seed(0)
    traced, spans = make()
    gates = Gates([0.0] * len(spans), 1).double()
    student = _gated(traced, spans, gates).eval()
    x = torch.randn(2, 3, 8, 8).double()
    student(x).square().sum().backward()
    decisions, eps = gates().detach(), 1e-6
    for number in range(len(spans)):
        values = []
        for change in (eps, -eps):
            moved = decisions.clone()
            moved[number] += change
            monkeypatch.setattr(gates, "forward", lambda moved=moved: moved)
            values.append(student(x).square().sum().item())
        slope = (values[0] - values[1]) / (2 * eps)
        assert slope != 0
        assert gates.values.grad[number].item() == pytest.approx(slope, rel=1e-5)


def small(blocks=3):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 1), *(Inverted() for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return df.trace(nn.Sequential(*layers).eval(), torch.randn(1, 3, 8, 8))


RECIPE = df.Recipe(steps=5, batch=8, lr=0.1)
INDIFFERENT = FunctionTask(
    loss=lambda model, step: 0 * model(torch.ones(2, 3, 8, 8)).sum(), score=lambda model, split: 0.0
)


@pytest.mark.parametrize(("costs", "removed"), [((3, 1, 2), (0,)), ((1, 2, 3), (2,)), ((-1, 0, -2), (1,))])
def test_penalty_removes_the_most_expensive_blocks(costs, removed):
    traced = small()
    plan = search_depthshrinker(traced, INDIFFERENT, RECIPE, kept=2, costs=costs, penalty=0.1)
    spans = inverted_residuals(traced.network)
    assert plan == plan_without(traced.network, [spans[number] for number in removed])


def test_search_keeps_the_block_whose_activations_matter():
    """Large biases make the activations of all blocks but one linear. The loss is the distance from the original."""
    model = nn.Sequential(*(Inverted() for _ in range(3)))
    torch.manual_seed(0)
    for number, block in enumerate(model):
        for part in block.body:
            if isinstance(part, nn.PReLU):
                nn.init.constant_(part.weight, 0.0 if number == 1 else 1.0)
    model.eval()
    x = torch.randn(4, 4, 8, 8)
    target = model(x).detach()
    task = FunctionTask(
        loss=lambda model, step: F.mse_loss(model(x), target), score=lambda model, split: 0.0, epoch_steps=1
    )
    traced = df.trace(model, x)
    spans = inverted_residuals(traced.network)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = search_depthshrinker(traced, task, RECIPE.replace(steps=20, lr=0.01), kept=1, costs=(0.0,) * 3)
    assert plan == plan_without(traced.network, [spans[0], spans[2]])
    assert all(torch.equal(tensor, before[name]) for name, tensor in traced.graph.state_dict().items())


def tensors_task():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 8, 8, generator=generator)
    return df.ClassificationTask.tensors(train=(images, torch.arange(64) % 4), holdout=0)


class OwnLoss(df.ClassificationTask):
    """A task that overrides loss() alone, so that its steps cannot be captured."""

    def loss(self, model, step):
        return 0 * super().loss(model, step)


@pytest.mark.parametrize("own_loss", [False, True])
def test_captured_steps_give_the_same_plan(monkeypatch, own_loss):
    task, recorder = tensors_task(), Recorder()
    if own_loss:
        task = OwnLoss(source=task.source, holdout=0)
    arguments = dict(kept=2, costs=(0.3, 0.1, 0.2))
    eager = search_depthshrinker(small(), task, RECIPE, **arguments)
    monkeypatch.setitem(capture.RECORDERS, "cpu", recorder)
    assert search_depthshrinker(small(), task, RECIPE, **arguments, device="cpu") == eager
    assert (recorder.replays > 0) != own_loss


def test_search_runs_on_each_device(device):
    """On a GPU, with captured steps and fused kernels."""
    recipe = RECIPE.replace(steps=8, precision="bfloat16", channels_last=True)
    traced = small()
    plan = search_depthshrinker(
        traced, tensors_task(), recipe, kept=2, costs=(1, 3, 2), penalty=1.0, teacher=small().graph, device=device
    )
    assert plan == plan_without(traced.network, [inverted_residuals(traced.network)[1]])


def test_costs_come_from_a_latency_table():
    network = mobilenet_v2()
    latency, _ = plausible_tables(network.spans(), network.flagged_spans(), 0)
    times = {(entry.span.i, entry.span.j): entry.times[1] for entry in latency.entries}
    spans = inverted_residuals(network)
    saved = [sum(times[l - 1, l] for l in span.layers) - times[span.i, span.j] for span in spans]
    scale = np.mean(COSTS["1.0"]) / np.mean(np.abs(saved))  # so that the unit of the table does not matter
    assert _checked_costs(network, spans, latency) == pytest.approx([scale * each for each in saved], abs=1e-5)


def test_latency_table_in_which_merging_saves_nothing_has_no_costs():
    network = mobilenet_v2()
    latency, _ = plausible_tables(network.spans(), network.flagged_spans(), 0)
    times = {entry.span: len(entry.span) for entry in latency.entries}
    flat = replace(latency, entries=[replace(entry, times=(times[entry.span],) * 2) for entry in latency.entries])
    with pytest.raises(InvalidValue, match=r"merging saves no time in any block\. Give costs="):
        _checked_costs(network, inverted_residuals(network), flat)


def test_wrong_arguments_are_refused():
    def search(traced, **given):
        search_depthshrinker(traced, INDIFFERENT, RECIPE, **dict(kept=1, costs=(1, 1, 1)) | given)

    with pytest.raises(InvalidValue, match=r"^4 blocks cannot be kept, because the network has 3\. Keep fewer\.$"):
        search(small(), kept=4)
    with pytest.raises(InvalidValue, match=r"^There are 2 costs for 3 blocks\. Give one for each block\.$"):
        search(small(), costs=(1, 2))
    plain = df.trace(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ReLU()), torch.ones(1, 3, 4, 4))
    with pytest.raises(InvalidValue, match=r"has no inverted residual blocks.*blocks=\[Span\(i, j\), \.\.\.\]"):
        search(plain)
    with pytest.raises(InvalidValue, match=r"\(0, 2\] has no activation inside"):
        search(plain, blocks=[df.Span(0, 2)])
    with pytest.raises(InvalidValue, match=r"search_depthshrinker\(\) takes a TracedNetwork"):
        search(mobilenet_v2())
