"""measure_importance() for kinds of networks: submodules, batch norms of other libraries, and networks on a GPU."""

from __future__ import annotations

import dataclasses
import io
import pickle

import cloudpickle
import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import depthfold as df
from depthfold.core import FlaggedSpan
from depthfold.errors import JournalError
from depthfold.importance import Method, importance_student, measure_importance
from depthfold.importance.entry import EntrySetup
from depthfold.importance.journal import importance_depends_on
from depthfold.store import Journal
from depthfold.tracing.inputs import ExampleInputs
from depthfold.vision import import_torchvision
from tiny_importance import RECIPE, SIZE, Pair, Tiny, TinyTask, holdout_score, tiny_network

INPUTS = torch.zeros(1, 2, SIZE, SIZE)
NETWORK = tiny_network()
CONV_2 = FlaggedSpan(1, 2, True, True)


class DataDependent(nn.Module):
    """A model of which only the body can be traced."""

    def __init__(self):
        super().__init__()
        self.body = Tiny()
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        x = self.body(x)
        return self.last(x) if x.sum() > -1e9 else x


def test_submodule(tmp_path):
    torch.manual_seed(3)
    model = DataDependent()
    traced = df.trace(model, INPUTS, at="body")
    table = measure_importance(traced, TinyTask(folder=str(tmp_path)), RECIPE, method="trained")
    assert table.base == pytest.approx(holdout_score(model.eval()), abs=1e-6)
    assert len(table.importances) == 18
    student, before = importance_student(traced, CONV_2, 0).state_dict(), model.state_dict()
    changed = {name for name in before if not torch.equal(student[name], before[name])}
    parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert changed == {"body.conv2.weight", "body.conv2.bias", *(f"body.norm2.{part}" for part in parts)}
    # All weights of the model count, not only those of the traced part.
    run = tmp_path / "run"
    Journal(run / "importance.jsonl", header_of(traced)).close()
    with torch.no_grad():
        model.last.bias += 1
    with pytest.raises(JournalError, match="weights: "):
        measure_importance(df.trace(model, INPUTS, at="body"), TinyTask(), RECIPE, run=run, method="trained")


def header_of(traced):
    return importance_depends_on(traced, TinyTask(), Method.of("trained", RECIPE))


class Fused(Pair):
    def forward(self, x):
        return self.head(self.norm2(self.conv2(self.norm1(self.conv1(x)))).mean((2, 3)))


def test_batch_norm_with_a_built_in_activation_is_reinitialised():
    model = Fused(timm.layers.BatchNormAct2d)
    traced = df.trace(model, INPUTS)
    assert traced.network.activations == {1, 2}
    student = importance_student(traced, CONV_2, seed=4)
    torch.manual_seed(4)
    fresh = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
    with torch.no_grad():
        x = torch.randn(2, 2, SIZE, SIZE)
        inner = torch.relu(F.batch_norm(
            model.conv1(x), model.norm1.running_mean, model.norm1.running_var, model.norm1.weight, model.norm1.bias
        ))  # fmt: skip
        wanted = model.head(torch.relu(fresh[1].eval()(fresh[0](inner))).mean((2, 3)))
        torch.testing.assert_close(student.eval()(x), wanted)
    assert len(measure_importance(traced, TinyTask(), RECIPE, method="trained").importances) == 3


def test_frozen_batch_norm_is_not_reinitialised():
    frozen = import_torchvision().ops.misc.FrozenBatchNorm2d
    model = Pair(frozen)
    traced = df.trace(model, INPUTS)
    student = importance_student(traced, CONV_2, seed=4).state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(student[name], value)}
    assert changed == {"conv2.weight"}
    assert len(measure_importance(traced, TinyTask(), RECIPE, method="trained").importances) == 3


class Opaque(nn.Module):
    """A module that tracing gives up after an activation and an addition, whose names are then taken."""

    def forward(self, x):
        y = F.relu(x) + x
        return y if y.sum() > 0 else -y


def test_network_is_the_same_after_pickling():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.opaque, self.conv1, self.conv2 = Opaque(), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

        def forward(self, x):
            x = F.dropout(self.opaque(x), 0.5, self.training)
            return F.relu(F.relu(self.conv2(F.relu(self.conv1(x)))) + x)

    traced = df.trace(Model().eval(), INPUTS)
    there = pickle.loads(cloudpickle.dumps(traced))
    assert [node.name for node in there.graph.graph.nodes] == [node.name for node in traced.graph.graph.nodes]
    x = torch.randn(2, 2, SIZE, SIZE)
    for block in traced.flagged_spans():
        here, unpickled = (importance_student(each, block, 1).eval() for each in (traced, there))
        assert torch.equal(here(x), unpickled(x))
    assert len(traced.flagged_spans()) == 3


class Devices(cloudpickle.Pickler):
    """A pickler that records the devices of all tensors."""

    def __init__(self):
        super().__init__(io.BytesIO())
        self.found = set()

    def persistent_id(self, thing):
        if not isinstance(thing, torch.Tensor):
            return None
        self.found.add(thing.device.type)
        return "tensor"


def devices_of(thing):
    pickler = Devices()
    pickler.dump(thing)
    return pickler.found


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # copy.deepcopy looks at it
@pytest.mark.parametrize("at", [None, "body"])
def test_network_on_a_gpu_is_sent_to_workers_on_the_cpu(at):
    """Fake tensors have no values, but any device."""
    traced = df.trace(DataDependent() if at else Pair(), INPUTS, at=at)
    with FakeTensorMode():
        statistics, image = torch.empty(4, device="cuda"), torch.empty(INPUTS.shape, device="cuda")
    for module in filter(None, (traced.graph, traced.model)):
        norm = next(part for part in module.modules() if isinstance(part, nn.BatchNorm2d))
        norm.running_mean = statistics
    blueprint = dataclasses.replace(traced.blueprint, inputs=ExampleInputs((image,)))
    traced = dataclasses.replace(traced, blueprint=blueprint)
    assert "cuda" in devices_of(traced)
    setup = EntrySetup(traced, TinyTask(), Method.of("trained", RECIPE))
    assert devices_of(setup) == {"cpu", "meta"}  # "meta": examples without values
    assert "cuda" in devices_of(traced)  # the network itself is not moved


def test_network_on_the_cpu_is_not_copied():
    assert EntrySetup(NETWORK, TinyTask(), Method.of("trained", RECIPE)).traced.graph is NETWORK.graph
