"""Channel pruning until a clock reads the target, with FLOPs as a clock that does not depend on the machine."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.baselines import prune_channels, pruning_steps, stopwatch, task_gradients
from depthfold.errors import BudgetError, InvalidValue
from depthfold.latency.profile import count_flops
from depthfold.training import FunctionTask
from lacking import needs

pytestmark = needs("torch_pruning")

X = torch.zeros(1, 3, 32, 32)


def clock(model):
    return count_flops(model, (X,)) / 1e6


class Inverted(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


def small():
    torch.manual_seed(0)
    blocks = [Inverted(32, 96), Inverted(32, 96), Inverted(32, 192)]
    with torch.no_grad():
        blocks[1].body[0].weight *= 0.5
    return nn.Sequential(nn.Conv2d(3, 32, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def convolutions(model):
    return [part for part in model.modules() if isinstance(part, nn.Conv2d)]


def test_pruning_stops_when_the_clock_reads_the_target():
    model, read = small(), []
    original = clock(model)

    def noted(pruned):
        read.append(clock(pruned))
        return read[-1]

    pruned = prune_channels(model, X, 0.5 * original, noted, steps=10)
    assert read[-1] == clock(pruned) <= 0.5 * original < read[-2]
    assert clock(model) == original == read[0]
    assert pruned(X).shape == (1, 10)
    assert {part.out_channels % 8 for part in convolutions(pruned)} == {0}
    kept = [a.out_channels / b.out_channels for a, b in zip(convolutions(pruned), convolutions(model), strict=True)]
    assert min(kept) < max(kept)  # global: not every layer gets equally narrow


def test_steps_go_on_from_one_copy():
    model = small()
    read = [clock(pruned) for pruned in pruning_steps(model, X, steps=4)]
    assert read == sorted(read, reverse=True)
    assert len(read) == 5
    assert read[0] == clock(model) > read[-1]


def test_small_steps_do_not_halve_narrow_layers():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    with torch.no_grad():
        for layer in convolutions(model):
            layer.weight *= torch.rand(16, 1, 1, 1) + 0.5
    widths = [[layer.out_channels for layer in convolutions(pruned)] for pruned in pruning_steps(model, X, steps=10)]
    assert widths[1] == widths[0] == [16] * 7  # 7 % of the channels would halve most layers if rounded down
    assert {8, 16} == {*widths[5]} and {*widths[10]} == {8}


class InDict(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return {"logits": self.model(x)}


def test_outputs_in_a_dict_keep_their_channels():
    model = InDict(small())
    pruned = prune_channels(model, X, 0.8 * clock(model), clock, steps=10)
    assert pruned(X)["logits"].shape == (1, 10)


def test_original_that_meets_the_target_is_only_copied():
    model = small()
    pruned = prune_channels(model, X, clock(model), clock)
    assert pruned is not model
    assert clock(pruned) == clock(model)


def test_target_out_of_reach_is_refused():
    model = small()
    with pytest.raises(BudgetError, match=r"takes \S+ ms after 3 steps, not 0\.001 ms; .*Use a larger target") as error:
        prune_channels(model, X, 0.001, clock, steps=3)
    assert 0.05 < error.value.fastest < 0.9


def two_layers():
    """Sixteen channels: the first eight have small weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 2, 1), nn.Flatten())
    with torch.no_grad():
        model[0].weight[:8] *= 0.1
    return model


@pytest.mark.parametrize("taylor", [False, True])
def test_gradients_decide_which_channels_are_important(taylor):
    """By their weights, the first half goes. The loss reads only the first half, so by their gradients it stays."""
    model = two_layers()

    def loss(pruned, step):
        assert step.recipe.batch == 4
        return pruned[0](torch.randn(4, 3, 32, 32, generator=step.generator()))[:, :8].sum()

    task = FunctionTask(loss=loss, score=lambda model, split: 0.0)
    gradients = task_gradients(task, df.Recipe(steps=1, batch=4), batches=2) if taylor else None
    pruned = prune_channels(
        model, X, 0.6 * clock(model), clock, gradients=gradients, steps=1, max_ratio=0.5, keep=["2"]
    )
    first, second = model[0].weight.chunk(2)
    assert torch.equal(pruned[0].weight, first if taylor else second)
    assert pruned[0].weight.grad is None


def test_model_is_pruned_on_its_device(device):
    model = small().to(device)
    x = torch.zeros(2, 3, 32, 32)
    task = FunctionTask(loss=lambda model, step: model(x.to(step.device)).sum(), score=lambda model, split: 0.0)
    gradients = task_gradients(task, df.Recipe(steps=1), batches=1)
    times = stopwatch(X, "cost_model")
    pruned = prune_channels(model, X, 0.8 * times(model), times, gradients=gradients, steps=10)
    assert times(pruned) <= 0.8 * times(model)
    assert pruned(x.to(device)).device.type == device


def test_layer_that_computes_the_output_must_be_named_if_it_is_not_found():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Flatten())
    with pytest.raises(InvalidValue, match=r"from \[\(1, 14400\)\] to \[\(1, 7200\)\]\. Name .* keep=\[\.\.\.\]"):
        prune_channels(model, X, 0.1, clock, steps=1, max_ratio=0.5)
    pruned = prune_channels(model, X, 0.6 * clock(model), clock, steps=1, max_ratio=0.5, keep=["2"])
    assert [part.out_channels for part in convolutions(pruned)] == [8, 16]


def test_stopwatch_measures_whole_networks_on_the_target():
    """The time of the cost model is known: 100 us, 20 us per convolution, 50 GFLOP/s and 10 GB/s."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    pixels = 32 * 32
    flops = 2 * pixels * (3 * 8 + 8 * 4)
    values = 3 * pixels + 24 + 8 * pixels + 8 * pixels + 32 + 4 * pixels
    seconds = 140e-6 + flops / 50e9 + 4 * values / 10e9
    assert stopwatch(X, "cost_model")(model) == pytest.approx(1000 * seconds)
    weights = 24 + 32
    seconds += 2 * (flops / 50e9 + 4 * (values - weights) / 10e9)
    assert stopwatch(X, "cost_model", inputs=X.repeat(3, 1, 1, 1))(model) == pytest.approx(1000 * seconds)


def test_package_is_imported_without_torch_and_torch_pruning():
    code = (
        "import sys; from depthfold import baselines; baselines.PATTERNS, baselines.layermerge_frontier; "
        "print([name for name in ('torch', 'torch_pruning') if name in sys.modules], dir(baselines) != []); "
        "baselines.search_depthshrinker, baselines.prune_channels; print('torch_pruning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["[] True", "False"], done.stderr
