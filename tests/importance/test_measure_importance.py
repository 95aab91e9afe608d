"""measure_importance(): what it keeps, what it refuses, and which networks it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import pickle
import warnings
import weakref

import cloudpickle
import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import depthfold as df
from depthfold.core import FlaggedSpan, ImportanceTable
from depthfold.errors import InvalidValue, JournalError, TableError
from depthfold.importance import IncompleteTable, importance_plan, importance_student, measure_importance
from depthfold.importance.entry import EntrySetup
from depthfold.importance.journal import importance_inputs
from depthfold.jobs import Processes
from depthfold.store import Journal
from depthfold.tracing.inputs import ExampleInputs
from depthfold.training import FunctionTask, train
from depthfold.vision import import_torchvision
from tiny_importance import RECIPE, SIZE, Pair, Tiny, TinyTask, holdout_score, tiny_network, trainings_in

INPUTS = torch.zeros(1, 2, SIZE, SIZE)
NETWORK = tiny_network()
PAIR = df.trace(Pair(), INPUTS)
BASE = holdout_score(df.rewrite(PAIR, PAIR.vanilla).eval())
CONV_2 = FlaggedSpan(1, 2, True, True)


def records(run):
    text = (run / "importance.jsonl").read_text()
    return [line for line in text.splitlines()[1:] if line]


def curves(run):
    """The learning curve of every training in a journal, without the base score."""
    found = {record["key"]: record["result"]["curve"] for record in map(json.loads, records(run))}
    return {key: curve for key, curve in found.items() if curve}


def test_several_seeds_are_kept_with_their_curves_and_survive_json(tmp_path):
    task, run = TinyTask(folder=str(tmp_path)), tmp_path / "run"
    recipe = RECIPE.replace(steps=4, evaluate=2)
    table = measure_importance(PAIR, task, recipe, seeds=2, run=run)
    assert ImportanceTable.loads(table.dumps()) == table
    runs = [tmp_path / f"seed {seed}" for seed in (5, 6)]
    singles = [measure_importance(PAIR, TinyTask(), recipe.replace(seed=5 + n), run=one) for n, one in enumerate(runs)]
    learned = curves(run)
    assert learned == curves(runs[0]) | curves(runs[1]) and len(learned) == 2 * len(table.entries)
    assert {tuple(step for step, _, _ in curve) for curve in learned.values()} == {(2, 4)}
    scores = sorted(score for entry in table.entries for score in entry.samples)
    assert sorted(curve[-1][2] for curve in learned.values()) == scores
    for entry, *single in zip(table.entries, *(one.entries for one in singles), strict=True):
        assert entry.seeds == (5, 6)
        assert entry.samples == tuple(one.samples[0] for one in single)
        assert entry.samples[0] != entry.samples[1]
    assert trainings_in(tmp_path) == 2 * len(table.entries)
    assert len(records(run)) == 2 * len(table.entries) + 1
    # One seed more: only what is missing is trained, and what a journal gives back is what was written.
    more = measure_importance(PAIR, task, recipe, seeds=3, run=run)
    assert trainings_in(tmp_path) == 3 * len(table.entries)
    assert [entry.samples[:2] for entry in more.entries] == [entry.samples for entry in table.entries]
    assert learned.items() <= curves(run).items()
    assert measure_importance(PAIR, task, recipe, seeds=2, run=run) == table


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    run = tmp_path_factory.mktemp("kept")
    measure_importance(NETWORK, TinyTask(), RECIPE, run=run)
    return run


def test_a_journal_of_something_else_is_refused_and_what_differs_is_named(kept):
    def refused(text, traced=NETWORK, task=TinyTask(), recipe=RECIPE):  # noqa: B008
        with pytest.raises(JournalError, match=text) as raised:
            measure_importance(traced, task, recipe, run=kept)
        return str(raised.value)

    start, end = r"The journal \S*importance.jsonl was made from other inputs \(", r"\)\. Use another run folder"
    refused(f"{start}recipe.lr: 0.05 there, 0.1 here{end}", recipe=RECIPE.replace(lr=0.1))
    changed = RECIPE.replace(steps=4, seed=6)
    text = refused(f"{start}recipe.steps: 3 there, 4 here; recipe.seed: 5 there, 6", recipe=changed)
    assert text.endswith("Use another run folder, or delete the journal to start again.")
    refused(f"{start}task: tiny there, other here{end}", task=TinyTask(identity="other"))
    refused(f"{start}weights: [0-9a-f]{{16}} there, [0-9a-f]{{16}} here{end}", traced=tiny_network(seed=1))
    larger = df.trace(Tiny(), torch.zeros(1, 2, SIZE + 1, SIZE + 1))
    refused(f"{start}network: [0-9a-f]{{16}} there, [0-9a-f]{{16}} here{end}", traced=larger)
    statistics = Tiny()
    statistics.norm3.running_mean += 1  # buffers are weights, too
    refused(f"{start}weights: ", traced=df.trace(statistics, INPUTS))
    measure_importance(tiny_network(), TinyTask(), RECIPE, run=kept)  # the same once more


def test_without_reinit_single_layers_share_the_training_of_the_original(tmp_path):
    task, run = TinyTask(folder=str(tmp_path)), tmp_path / "run"
    table = measure_importance(NETWORK, task, RECIPE, reinit=False, run=run)
    vanilla = df.rewrite(NETWORK, NETWORK.vanilla)
    train(vanilla, TinyTask(), RECIPE)
    unchanged = {
        e.span: e.samples for e in table.entries if importance_plan(NETWORK.network, e.span) == NETWORK.vanilla
    }
    assert len(unchanged) == NETWORK.depth and set(unchanged.values()) == {(holdout_score(vanilla.eval()),)}
    # An activation inserted at 3 is the same network, whether it stands behind the layer or before the next one.
    singles = [entry.span for entry in table.entries if len(entry.span.span) == 1]
    networks = {importance_plan(NETWORK.network, span) for span in singles}
    assert len(networks) == 3 < len(singles)
    assert trainings_in(tmp_path) == len(table.entries) - len(singles) + 3 == len(records(run)) - 1
    fresh = {entry.span: entry for entry in measure_importance(NETWORK, TinyTask(), RECIPE).entries}
    others = [entry for entry in table.entries if entry.span not in unchanged]
    assert {len(entry.span.span) for entry in others} > {1}  # a layer with other activations than its own is among them
    for entry in others:
        if len(entry.span.span) > 1:
            assert entry == fresh[entry.span]
        else:
            student = df.rewrite(NETWORK, importance_plan(NETWORK.network, entry.span))
            train(student, TinyTask(), RECIPE)
            assert entry.samples == (holdout_score(student.eval()),) != fresh[entry.span].samples
    assert measure_importance(NETWORK, task, RECIPE, reinit=False, run=run) == table
    assert table.provenance.endswith("; reinit=False")


def test_a_journal_with_another_reinit_is_refused(kept, tmp_path):
    differ = r"other inputs \(reinit: {} there, {} here\)"
    with pytest.raises(JournalError, match=differ.format(True, False)):
        measure_importance(NETWORK, TinyTask(), RECIPE, reinit=False, run=kept)
    measure_importance(PAIR, TinyTask(), RECIPE, reinit=False, run=tmp_path)
    with pytest.raises(JournalError, match=differ.format(False, True)):
        measure_importance(PAIR, TinyTask(), RECIPE, run=tmp_path)


def test_two_functions_have_the_name_that_they_are_given(tmp_path):
    def task(identity):
        return FunctionTask(loss=TinyTask().loss, score=TinyTask().score, identity=identity)

    table = measure_importance(PAIR, task("one"), RECIPE, run=tmp_path)
    assert table.provenance.startswith("one; seeds 5; ")
    with pytest.raises(JournalError, match=r"was made from other inputs \(task: one there, two here\)"):
        measure_importance(PAIR, task("two"), RECIPE, run=tmp_path)
    assert measure_importance(PAIR, task(""), RECIPE).provenance.startswith("FunctionTask; seeds 5; ")


def test_what_makes_no_sense():
    class NoScore:
        def loss(self, model, step): ...
        def steps_per_epoch(self, recipe): ...

    def refused(text, traced=NETWORK, task=TinyTask(), recipe=RECIPE, **options):  # noqa: B008
        with pytest.raises(InvalidValue, match=text):
            measure_importance(traced, task, recipe, **options)

    refused("methods loss, score and steps_per_epoch; NoScore lacks one of them. FunctionTask", task=NoScore())
    refused("a TracedNetwork, found a Network without a model. Pass", traced=NETWORK.network)
    refused("takes a Recipe or the name of one, found {'lr': 1}", recipe={"lr": 1})
    refused("There is no recipe 'importanc'. Did you mean 'importance'", recipe="importanc")
    refused("There is no search space 'ful'", space="ful")
    ways = r"for example InProcess\(\), Processes\(workers=2\) or RayCluster\(address=\"auto\"\)\.$"
    refused(
        f"^An executor is an object with the method run, found 'ray'\\. Use one from depthfold.jobs, {ways}",
        executor="ray",
    )
    refused("with the method run, found <class .*Processes'>", executor=Processes)
    refused("with the method run, found 2", executor=2)
    refused("^The run folder must be a path, found 5. Pass a string or a pathlib.Path.$", run=5)
    for seeds in (0, -1, 1.5, "2", True):
        refused(f"The number of seeds must be an integer of at least 1, found {seeds!r}", seeds=seeds)


class Broken:
    """A score that fails, for the original network alone or for every other one."""

    def __init__(self, folder, how, original):
        self.task, self.how, self.original = TinyTask(folder=str(folder)), how, original
        self.loss, self.steps_per_epoch = self.task.loss, self.task.steps_per_epoch

    def score(self, model, split):
        score = self.task.score(model, split)
        return self.how() if (score == BASE) == self.original else score


def unreadable():
    raise OSError("the disk is gone")


def too_large():
    raise MemoryError("the images do not fit")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (unreadable, r"error: OSError: the disk is gone \(test_measure_importance.py, line \d+, in unreadable"),
        (lambda: float("inf"), "not finite: The score of the original network is inf"),
        (too_large, "out of memory: the images do not fit"),
    ],
)
def test_a_base_score_that_fails_stops_everything(tmp_path, how, text):
    run = tmp_path / "run"
    broken = Broken(tmp_path, how, original=True)
    with pytest.raises(
        TableError, match=rf"The original network cannot be scored on the hold-out set: {text}"
    ) as raised:
        measure_importance(PAIR, broken, RECIPE, run=run)
    assert str(raised.value).endswith("Mend the task's score, or the data, and run again.")
    assert trainings_in(tmp_path) == 0
    assert len(records(run)) == 1
    broken.original = None  # mended: it goes on without being told to try again
    table = measure_importance(PAIR, broken, RECIPE, run=run)
    assert table.base == BASE
    assert len(table.importances) == len(table.entries)


def test_every_training_failed(tmp_path):
    text = (
        r"Every training failed. The first one: \(0, 1\], flags 11: error: OSError: the disk is gone .*\. Mend that, "
        r"and run it again with retry=True, or with --retry on the command line\.$"
    )
    with pytest.raises(TableError, match=text):
        measure_importance(PAIR, Broken(tmp_path, unreadable, original=False), RECIPE)


def test_every_training_failed_for_a_reason_that_is_a_sentence(tmp_path):
    fates = tuple((importance_plan(PAIR.network, block), "nan") for block in PAIR.flagged_spans())
    with pytest.raises(TableError, match=r"gradient \(clip\)\. Mend that, and run it again"):
        measure_importance(PAIR, TinyTask(folder=str(tmp_path), fates=fates), RECIPE)


def test_a_block_of_which_one_training_failed_says_so(tmp_path):
    plan = importance_plan(PAIR.network, FlaggedSpan(0, 2, True, True))
    run, failing = tmp_path / "run", TinyTask(folder=str(tmp_path), fates=((plan, "nan"),))
    whole = TinyTask(folder=str(tmp_path))
    with pytest.warns(IncompleteTable, match="1 block of 3 could not be trained, and no plan will use them"):
        measure_importance(PAIR, failing, RECIPE, run=run)
    text = r"^1 block of 3 could not be trained as often as asked for:\n  \(0, 2\], flags 11: 1 of 2 trainings\nTo try"
    with pytest.warns(IncompleteTable, match=text):
        table = measure_importance(PAIR, whole, RECIPE, seeds=2, run=run)
    entry = next(entry for entry in table.entries if (entry.span.i, entry.span.j) == (0, 2))
    assert (entry.seeds, len(entry.samples), entry.reason) == ((6,), 1, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = measure_importance(PAIR, whole, RECIPE, seeds=2, run=run, retry=True)
    assert again == measure_importance(PAIR, whole, RECIPE, seeds=2)


class Whole(nn.Module):
    """A model whose own forward cannot be traced, only its body."""

    def __init__(self):
        super().__init__()
        self.body = Tiny()
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        x = self.body(x)
        return self.last(x) if x.sum() > -1e9 else x


def test_a_submodule(tmp_path):
    torch.manual_seed(3)
    model = Whole()
    traced = df.trace(model, INPUTS, at="body")
    table = measure_importance(traced, TinyTask(folder=str(tmp_path)), RECIPE)
    assert table.base == pytest.approx(holdout_score(model.eval()), abs=1e-6)
    assert len(table.importances) == 18
    student, before = importance_student(traced, CONV_2, 0).state_dict(), model.state_dict()
    changed = {name for name in before if not torch.equal(student[name], before[name])}
    parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert changed == {"body.conv2.weight", "body.conv2.bias", *(f"body.norm2.{part}" for part in parts)}
    # Weights of the whole model count, not only those of the part that was traced.
    run = tmp_path / "run"
    Journal(run / "importance.jsonl", header_of(traced)).close()
    with torch.no_grad():
        model.last.bias += 1
    with pytest.raises(JournalError, match="weights: "):
        measure_importance(df.trace(model, INPUTS, at="body"), TinyTask(), RECIPE, run=run)


def header_of(traced):
    return importance_inputs(traced, TinyTask(), RECIPE, reinit=True)


class Fused(Pair):
    def forward(self, x):
        return self.head(self.norm2(self.conv2(self.norm1(self.conv1(x)))).mean((2, 3)))


def test_a_batch_norm_with_its_activation_inside_is_reinitialised():
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
    assert len(measure_importance(traced, TinyTask(), RECIPE).importances) == 3


def test_a_frozen_batch_norm_stays_as_it_is():
    frozen = import_torchvision().ops.misc.FrozenBatchNorm2d
    model = Pair(frozen)
    traced = df.trace(model, INPUTS)
    student = importance_student(traced, CONV_2, seed=4).state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(student[name], value)}
    assert changed == {"conv2.weight"}
    assert len(measure_importance(traced, TinyTask(), RECIPE).importances) == 3


class Opaque(nn.Module):
    """What tracing gives up after it has seen an activation and an addition: their names are then taken."""

    def forward(self, x):
        y = F.relu(x) + x
        return y if y.sum() > 0 else -y


def test_a_network_that_travelled_is_the_same_network():
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
        here, away = (importance_student(each, block, 1).eval() for each in (traced, there))
        assert torch.equal(here(x), away(x))
    assert len(traced.flagged_spans()) == 3


class Devices(cloudpickle.Pickler):
    """Where the tensors of what is pickled are."""

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
def test_a_network_on_a_gpu_travels_to_workers_without_one(at):
    """Fake tensors have no values, but a device that this machine may lack."""
    traced = df.trace(Whole() if at else Pair(), INPUTS, at=at)
    with FakeTensorMode():
        statistics, image = torch.empty(4, device="cuda"), torch.empty(INPUTS.shape, device="cuda")
    for module in filter(None, (traced.graph, traced.model)):
        norm = next(part for part in module.modules() if isinstance(part, nn.BatchNorm2d))
        norm.running_mean = statistics
    blueprint = dataclasses.replace(traced.blueprint, inputs=ExampleInputs((image,)))
    traced = dataclasses.replace(traced, blueprint=blueprint)
    assert "cuda" in devices_of(traced)
    assert devices_of(EntrySetup(traced, TinyTask(), RECIPE)) == {"cpu", "meta"}  # "meta": examples without values
    assert "cuda" in devices_of(traced)  # which is not moved itself


def test_a_network_on_the_cpu_is_not_copied():
    assert EntrySetup(NETWORK, TinyTask(), RECIPE).traced.graph is NETWORK.graph


def test_a_score_that_draws_global_random_numbers_is_the_same_each_time():
    def score(model, split):
        return torch.rand(()).item()

    task = FunctionTask(loss=TinyTask().loss, score=score)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = measure_importance(PAIR, task, RECIPE)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert measure_importance(PAIR, task, RECIPE) == one


def test_an_autocast_around_it_changes_nothing():
    expected = measure_importance(NETWORK, TinyTask(), RECIPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert measure_importance(NETWORK, TinyTask(), RECIPE) == expected


def test_the_recipe_by_name_and_progress():
    told = []

    def progress(what, total, done):
        told.append((what, total, done))
        return lambda: told.append("one more")

    def no_loss(model, step):
        raise ValueError(str((step.recipe.lr, step.recipe.crop)))

    task = FunctionTask(loss=no_loss, score=lambda model, split: 1.0, epoch_steps=1)
    with pytest.raises(TableError, match=r"ValueError: \(0\.1, 'resized'\)"):
        measure_importance(PAIR, task, progress=progress)
    assert told == [("trainings", 4, 0), *["one more"] * 4]


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_leaves_no_weights_behind_even_if_it_fails(fails):
    seen = []

    def loss(model, step):
        seen.extend(weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers()))
        if step.number == 2 and fails:
            raise ValueError("on purpose")
        return TinyTask().loss(model, step)

    setup = EntrySetup(PAIR, FunctionTask(loss=loss, score=TinyTask().score), RECIPE)
    gc.disable()  # it would come by at some time, but on a GPU the next training needs the memory now
    try:
        with contextlib.suppress(ValueError):
            setup.result(((0, 2, True, True), 0))
        assert seen
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()
