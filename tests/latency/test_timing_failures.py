"""Runtimes that fail during timing, after a module has compiled and run once."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.backends.cost_model import CostModel
from depthfold.core import Span
from depthfold.errors import BackendError, BudgetError, OutOfMemory, TableError, lacks_memory
from depthfold.latency import candidates, choose, measure_latency, profile, profile_all
from depthfold.latency.blocks import BlockShape
from depthfold.merging import sketch
from depthfold.rewriting import rewrite
from latency_workshop import COST, QUICK, milliseconds, plans


class Failing:
    """A compiled module that raises at the n-th run."""

    def __init__(self, compiled, at, error):
        self.compiled, self.close, self.left, self.error = compiled, compiled.close, at, error

    def seconds(self):
        self.left -= 1
        if self.left <= 0:
            raise self.error
        return self.compiled.seconds()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragile(CostModel):
    """A runtime on which modules with `broken(module)` fail at a given run; the third run is in the second round."""

    broken: object = None
    at: int = 3
    error: object = None
    compiled: list = dataclasses.field(default_factory=list)

    def environment(self, inputs):
        return COST.environment(inputs)

    def compile(self, module, inputs):
        self.compiled.append(module)
        compiled = CostModel.compile(self, module, inputs)
        return Failing(compiled, self.at, self.error) if self.broken(module) else compiled


def largest_kernel(module):
    return max(getattr(part, "kernel_size", (1,))[0] for part in module.modules())


def is_whole(module):
    return any(isinstance(part, nn.Linear) for part in module.modules())


@pytest.mark.parametrize(
    ("at", "error", "reason"),
    [
        (3, RuntimeError("device lost"), "It ran once and then failed: device lost"),
        (3, BackendError("PyTorch cannot run this module: device lost"), "PyTorch cannot run this module: device lost"),
        (1, RuntimeError("CUDA out of memory"), "It ran once and then failed: CUDA out of memory"),
    ],
)
def test_block_that_fails_during_timing_has_a_reason_and_the_others_are_timed(traced, tmp_path, at, error, reason):
    fragile = Fragile(at=at, broken=lambda module: largest_kernel(module) >= 5, error=error)
    journal = tmp_path / "latency.jsonl"
    table = measure_latency(traced, fragile, timer=QUICK, networks=8, run=tmp_path)
    large = {span for span in traced.spans("paper") if max(traced.network.merged_shape(span).kernel) >= 5}
    assert large and {entry.span: entry.reason for entry in table.entries if entry.times is None} == dict.fromkeys(
        large, reason
    )
    alone = measure_latency(traced, COST, mode="alone", timer=QUICK)
    samples = {e.span: (e.count, e.quartiles) for e in table.entries if e.span not in large}
    assert samples == {e.span: (e.count, e.quartiles) for e in alone.entries if e.span not in large}
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert {record["reason"] for record in records if "reason" in record} == {reason}


def test_failed_blocks_are_tried_again_only_with_retry(traced, tmp_path):
    broken = [True]
    fragile = Fragile(broken=lambda module: broken and largest_kernel(module) >= 5, error=RuntimeError("device lost"))
    given = dict(mode="alone", timer=QUICK, run=tmp_path)
    some = measure_latency(traced, fragile, **given)
    broken.clear()
    fragile.compiled.clear()
    assert measure_latency(traced, fragile, **given) == some
    assert fragile.compiled == []
    whole = measure_latency(traced, fragile, **given, retry=True)
    known = [module for module in fragile.compiled if largest_kernel(module) < 5]
    assert len(known) == 1 < len(fragile.compiled) - 1  # a known block, timed again to check the speed of the machine
    assert len(some.times) < len(whole.times) == len(whole.entries)
    fragile.compiled.clear()
    assert measure_latency(traced, fragile, **given) == whole  # the old reasons in the journal no longer count
    assert fragile.compiled == []


@pytest.mark.parametrize("limit", [2**27, 2**60])
def test_block_that_cannot_be_built_has_a_reason_and_the_others_are_timed(monkeypatch, limit):
    """Merged, ten million channels to one and back would be a convolution with 400 TB of weights."""
    monkeypatch.setattr("depthfold.core.shape.LARGEST", limit)
    monkeypatch.setattr(
        "depthfold.latency.cannot_pay.FACTOR", float("inf")
    )  # otherwise it is left out before it is built
    wide = 10_000_000
    model = nn.Sequential(nn.Conv2d(wide, 1, 1), nn.ReLU(), nn.Conv2d(1, wide, 1), nn.ReLU())
    table = measure_latency(df.trace(model, torch.randn(1, wide, 1, 1)), COST, timer=QUICK, mode="alone")
    assert set(table.times) == {Span(0, 1), Span(1, 2)}
    (reason,) = [entry.reason for entry in table.entries if entry.times is None]
    assert "\n" not in reason
    if limit == 2**27:
        assert reason == (
            "It is too large: it would be a convolution 1x1, 10000000 -> 10000000 of 745058.1 GiB in float64, and the "
            "limit is 1 GiB."
        )
    else:
        assert reason.startswith("It cannot be built: ")
        assert lacks_memory(Exception(reason))  # the text depends on the processor


def test_inputs_and_networks_that_cannot_be_built_have_reasons(traced, monkeypatch, tmp_path):
    def too_large(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(candidates, "sketch", too_large)
    with pytest.raises(TableError, match=r"Only 0 whole networks.*: It cannot be built: no room\."):
        measure_latency(traced, COST, timer=QUICK, networks=4, run=tmp_path)
    monkeypatch.setattr(BlockShape, "inputs", too_large)
    table = measure_latency(traced, COST, timer=QUICK, mode="alone")
    assert {entry.reason for entry in table.entries} == {"It cannot be built: no room"}


def test_block_without_memory_is_tried_again_alone(traced):
    """A device that runs out of memory with more than ten modules."""
    alive = []

    class Crowded:
        def __init__(self, compiled):
            self.compiled = compiled
            alive.append(self)

        def seconds(self):
            if len(alive) > 10:
                raise RuntimeError("CUDA out of memory")
            return self.compiled.seconds()

        def close(self):
            alive.remove(self)

    @dataclasses.dataclass(frozen=True, slots=True)
    class Narrow(CostModel):
        def compile(self, module, inputs):
            return Crowded(CostModel.compile(self, module, inputs))

    table = measure_latency(traced, Narrow(), mode="alone", timer=QUICK)
    assert table.times == measure_latency(traced, COST, mode="alone", timer=QUICK).times
    assert alive == []


def test_network_that_fails_during_timing_is_left_out_of_the_calibration(traced):
    vanilla = len(traced.network.segments(traced.vanilla))

    def deep(module):
        return is_whole(module) and sum(isinstance(part, nn.Conv2d) for part in module.modules()) > vanilla - 2

    table = measure_latency(traced, Fragile(broken=deep, error=RuntimeError("device lost")), timer=QUICK, networks=12)
    everything = measure_latency(traced, COST, timer=QUICK, networks=12)
    assert 2 <= table.calibration.networks < everything.calibration.networks
    with pytest.raises(TableError, match=r"Only 0 whole networks could be timed.*device lost\. Use another"):
        measure_latency(traced, Fragile(broken=is_whole, error=RuntimeError("device lost")), timer=QUICK, networks=6)


def test_candidate_that_fails_during_timing_is_skipped(traced, frontier):
    wanted = choose(traced, frontier, "80%", COST, timer=QUICK)
    depth = sum(isinstance(part, nn.Conv2d) for part in sketch(rewrite(traced, wanted.plan)).modules())
    original = sum(isinstance(part, nn.Conv2d) for part in sketch(rewrite(traced, traced.vanilla)).modules())

    def broken(module):
        return sum(isinstance(part, nn.Conv2d) for part in module.modules()) == depth != original

    plan = choose(traced, frontier, "80%", Fragile(broken=broken, error=RuntimeError("device lost")), timer=QUICK)
    assert plan.importance < wanted.importance
    assert milliseconds(traced, plan.plan) <= 0.8 * milliseconds(traced, traced.vanilla)
    others = Fragile(
        broken=lambda module: sum(isinstance(p, nn.Conv2d) for p in module.modules()) != original,
        error=RuntimeError("device lost"),
    )
    with pytest.raises(BudgetError, match=r"No plan could be measured for the budget of 80%.*device lost"):
        choose(traced, frontier, "80%", others, timer=QUICK)


def test_failure_of_the_original_is_not_blamed_on_a_candidate(traced, frontier):
    """It fails when it is timed together with the first candidate."""
    original = sum(isinstance(part, nn.Conv2d) for part in sketch(rewrite(traced, traced.vanilla)).modules())

    def broken(module):
        return is_whole(module) and sum(isinstance(part, nn.Conv2d) for part in module.modules()) == original

    fragile = Fragile(broken=broken, at=7, error=RuntimeError("device lost"))
    with pytest.raises(BackendError, match=r"The original network cannot be timed.*device lost\. Run again"):
        choose(traced, frontier, "80%", fragile, timer=QUICK)
    assert len(fragile.compiled) == 2
    crowded = Fragile(
        broken=broken, at=7, error=MemoryError("no more.")
    )  # it runs alone, but not together with a candidate
    text = r"for the budget of 80%.*The original does not fit into memory together with it: .*no more\. Use another"
    with pytest.raises(BudgetError, match=text):
        choose(traced, frontier, "80%", crowded, timer=QUICK)
    assert len(crowded.compiled) > 2
    at_once = Fragile(broken=broken, error=RuntimeError("device lost."))
    with pytest.raises(BackendError, match=r"The original network cannot be timed.*device lost\. Run again"):
        choose(traced, frontier, "80%", at_once, timer=QUICK)


def test_profile_names_the_network_that_cannot_be_built(traced):
    both = {"before": sketch(rewrite(traced, traced.vanilla)), "after": sketch(rewrite(traced, plans(traced, 3)[2]))}

    class Refusing(CostModel):
        def compile(self, module, inputs):
            if module is both["after"]:
                raise OutOfMemory("no room")
            return COST.compile(module, inputs)

    with pytest.raises(OutOfMemory, match=r"The profile of 'after' cannot be measured\. .*no room"):
        profile_all(both, torch.randn(1, 3, 32, 32), Refusing(), timer=QUICK)


def test_profile_names_the_network_that_fails_during_timing(traced):
    both = {"before": sketch(rewrite(traced, traced.vanilla)), "after": sketch(rewrite(traced, plans(traced, 3)[2]))}
    x = torch.randn(1, 3, 32, 32)
    for error, kind in ((RuntimeError("device lost"), BackendError), (MemoryError("no more"), OutOfMemory)):
        fragile = Fragile(broken=lambda module: True, error=error)
        with pytest.raises(kind, match=f"profile of 'network' cannot be measured.*failed: {error}"):
            profile(both["after"], x, fragile, timer=QUICK)
    only = largest_kernel(both["after"])
    fragile = Fragile(broken=lambda module: largest_kernel(module) == only, error=RuntimeError("device lost"))
    assert only != largest_kernel(both["before"])
    with pytest.raises(BackendError, match="profile of 'after' cannot be measured"):
        profile_all(both, x, fragile, timer=QUICK)
