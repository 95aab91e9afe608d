"""measure_importance(): its journal, its arguments and failures."""

from __future__ import annotations

import contextlib
import gc
import json
import warnings
import weakref

import pytest
import torch

import depthfold as df
from depthfold.core import BlockOption, FlaggedSpan, ImportanceTable
from depthfold.errors import InvalidValue, JournalError, TableError
from depthfold.importance import IncompleteTable, Method, importance_plan, measure_importance
from depthfold.importance.entry import EntrySetup
from depthfold.jobs import InProcess, Processes
from depthfold.training import FunctionTask, train
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
    """Return the learning curve of every training in a journal."""
    found = {record["key"]: record["result"]["curve"] for record in map(json.loads, records(run))}
    return {key: curve for key, curve in found.items() if curve}


def test_several_seeds_and_their_learning_curves(tmp_path):
    task, run = TinyTask(folder=str(tmp_path)), tmp_path / "run"
    recipe = RECIPE.replace(steps=4, evaluate=2)
    table = measure_importance(PAIR, task, recipe, seeds=2, run=run, method="trained")
    assert ImportanceTable.loads(table.dumps()) == table
    runs = [tmp_path / f"seed {seed}" for seed in (5, 6)]
    singles = [
        measure_importance(PAIR, TinyTask(), recipe.replace(seed=5 + n), run=one, method="trained")
        for n, one in enumerate(runs)
    ]
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
    # With one more seed, only the missing trainings run, and the others are read from the journal.
    more = measure_importance(PAIR, task, recipe, seeds=3, run=run, method="trained")
    assert trainings_in(tmp_path) == 3 * len(table.entries)
    assert [entry.samples[:2] for entry in more.entries] == [entry.samples for entry in table.entries]
    assert learned.items() <= curves(run).items()
    assert measure_importance(PAIR, task, recipe, seeds=2, run=run, method="trained") == table


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    measure_importance(NETWORK, TinyTask(), RECIPE, run=run, method="trained")
    return run


def test_journal_of_other_inputs_is_refused_with_the_differences(finished_run):
    def refused(text, traced=NETWORK, task=TinyTask(), recipe=RECIPE):  # noqa: B008
        with pytest.raises(JournalError, match=text) as raised:
            measure_importance(traced, task, recipe, run=finished_run, method="trained")
        return str(raised.value)

    start, end = r"The journal \S*importance.jsonl was made from other inputs \(", r"\)\. Give the same as before"
    refused(f"{start}recipe.lr: 0.05 there, 0.1 here{end}", recipe=RECIPE.replace(lr=0.1))
    changed = RECIPE.replace(steps=4, seed=6)
    text = refused(f"{start}recipe.steps: 3 there, 4 here; recipe.seed: 5 there, 6", recipe=changed)
    assert text.endswith("same as before, use another run folder, or delete the journal to start again.")
    refused(f"{start}task: tiny there, other here{end}", task=TinyTask(identity="other"))
    refused(f"{start}weights: [0-9a-f]{{16}} there, [0-9a-f]{{16}} here{end}", traced=tiny_network(seed=1))
    larger = df.trace(Tiny(), torch.zeros(1, 2, SIZE + 1, SIZE + 1))
    refused(f"{start}network: [0-9a-f]{{16}} there, [0-9a-f]{{16}} here{end}", traced=larger)
    statistics = Tiny()
    statistics.norm3.running_mean += 1  # buffers also count as weights
    refused(f"{start}weights: ", traced=df.trace(statistics, INPUTS))
    measure_importance(tiny_network(), TinyTask(), RECIPE, run=finished_run, method="trained")  # the same inputs


def test_without_reinit_single_layers_share_the_training_of_the_original(tmp_path):
    task, run = TinyTask(folder=str(tmp_path)), tmp_path / "run"
    table = measure_importance(NETWORK, task, RECIPE, reinit=False, run=run, method="trained")
    vanilla = df.rewrite(NETWORK, NETWORK.vanilla)
    train(vanilla, TinyTask(), RECIPE)
    unchanged = {
        e.span: e.samples for e in table.entries if importance_plan(NETWORK.network, e.span) == NETWORK.vanilla
    }
    assert len(unchanged) == NETWORK.depth and set(unchanged.values()) == {(holdout_score(vanilla.eval()),)}
    # An activation inserted at 3 gives the same network, at the end of layer 3 or at the start of layer 4.
    singles = [entry.span for entry in table.entries if len(entry.span.span) == 1]
    networks = {importance_plan(NETWORK.network, span) for span in singles}
    assert len(networks) == 3 < len(singles)
    assert trainings_in(tmp_path) == len(table.entries) - len(singles) + 3 == len(records(run)) - 1
    fresh = {entry.span: entry for entry in measure_importance(NETWORK, TinyTask(), RECIPE, method="trained").entries}
    others = [entry for entry in table.entries if entry.span not in unchanged]
    assert {len(entry.span.span) for entry in others} > {1}  # also single layers with changed activations
    for entry in others:
        if len(entry.span.span) > 1:
            assert entry == fresh[entry.span]
        else:
            student = df.rewrite(NETWORK, importance_plan(NETWORK.network, entry.span))
            train(student, TinyTask(), RECIPE)
            assert entry.samples == (holdout_score(student.eval()),) != fresh[entry.span].samples
    assert measure_importance(NETWORK, task, RECIPE, reinit=False, run=run, method="trained") == table
    assert table.provenance.endswith("; reinit=False")


def test_journal_with_another_reinit_is_refused(finished_run, tmp_path):
    differ = r"other inputs \(reinit: {} there, {} here\)"
    with pytest.raises(JournalError, match=differ.format(True, False)):
        measure_importance(NETWORK, TinyTask(), RECIPE, reinit=False, run=finished_run, method="trained")
    measure_importance(PAIR, TinyTask(), RECIPE, reinit=False, run=tmp_path, method="trained")
    with pytest.raises(JournalError, match=differ.format(False, True)):
        measure_importance(PAIR, TinyTask(), RECIPE, run=tmp_path, method="trained")


def test_identity_of_a_function_task(tmp_path):
    def task(identity):
        return FunctionTask(loss=TinyTask().loss, score=TinyTask().score, identity=identity)

    table = measure_importance(PAIR, task("one"), RECIPE, run=tmp_path)
    assert table.provenance.startswith("one; seeds 5; ")
    with pytest.raises(JournalError, match=r"was made from other inputs \(task: one there, two here\)"):
        measure_importance(PAIR, task("two"), RECIPE, run=tmp_path)
    assert measure_importance(PAIR, task(""), RECIPE).provenance.startswith("FunctionTask; seeds 5; ")


def test_wrong_arguments_are_refused():
    class NoScore:
        def loss(self, model, step): ...
        def steps_per_epoch(self, recipe): ...

    def refused(text, traced=NETWORK, task=TinyTask(), recipe=RECIPE, **options):  # noqa: B008
        with pytest.raises(InvalidValue, match=text):
            measure_importance(traced, task, recipe, **options)

    refused("methods loss, score and steps_per_epoch; NoScore lacks one of them. FunctionTask", task=NoScore())
    refused("a TracedNetwork, found a Network without a model. Pass", traced=NETWORK.network)
    refused("takes a Recipe or the name of a preset, found {'lr': 1}", recipe={"lr": 1})
    refused("There is no recipe 'importanc'. Did you mean 'importance'", recipe="importanc")
    refused("There is no search space 'ful'", space="ful")
    examples = r"for example InProcess\(\), Processes\(workers=2\) or RayCluster\(address=\"auto\"\)\.$"
    refused(
        f"^An executor is an object with the method run, found 'ray'\\. Use one from depthfold.jobs, {examples}",
        executor="ray",
    )
    refused("with the method run, found <class .*Processes'>", executor=Processes)
    refused("with the method run, found 2", executor=2)
    refused("^The run folder must be a path, found 5. Pass a string or a pathlib.Path.$", run=5)
    for seeds in (0, -1, 1.5, "2", True):
        refused(f"The number of seeds must be an integer of at least 1, found {seeds!r}", seeds=seeds)


class Broken:
    """A task whose score fails, either for the original network or for all others."""

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


@pytest.mark.parametrize("part", ["loss", "score"])
def test_function_of_a_task_that_fails_is_named(part):
    """A method that recalibrates runs the loss before the score."""

    def missing(*_):
        return {}["missing"]

    task = FunctionTask(**{"loss": TinyTask().loss, "score": TinyTask().score} | {part: missing})
    said = r"^The task fails for the original network: error: KeyError: 'missing' \(test_.*in missing: .*\)\. Correct"
    with pytest.raises(TableError, match=said):
        measure_importance(PAIR, task, RECIPE, method="recalibrated")


@pytest.mark.parametrize(
    ("score", "found"),
    [
        (None, "NoneType"),
        ({"top-1": 0.5}, "dict"),
        ((0.5, 1), "tuple"),
        ("0.5", "str"),
        (torch.zeros(2), r"a tensor of shape \(2,\)"),
    ],
)
def test_score_that_is_not_a_number_is_explained(score, found):
    task = FunctionTask(loss=TinyTask().loss, score=lambda *_: score)
    said = rf"network: error: The task's score must be a single number, higher for a better model, found {found}\. Corr"
    with pytest.raises(TableError, match=said):
        measure_importance(PAIR, task, RECIPE, method="recalibrated")


class OneWorker:
    """An executor with one worker, which is in this process but not known to be. It keeps the keys of each run."""

    def __init__(self):
        self.runs = []

    def run(self, setup, jobs):
        self.runs.append([job.key for job in jobs])
        return InProcess().run(setup, jobs)


UNREADABLE = (unreadable, r"error: OSError: the disk is gone \(test_measure_importance.py, line \d+, in unreadable")
INFINITE = (lambda: float("inf"), "not finite: The score of the original network is inf")


@pytest.mark.parametrize(("how", "text"), [UNREADABLE, INFINITE])
def test_worker_that_cannot_score_the_original_trains_no_block(tmp_path, how, text):
    """Out of memory is not among these failures: the executor would score it again after the blocks."""
    worker = OneWorker()
    with pytest.raises(TableError, match=f"^The task fails for the original network: {text}"):
        measure_importance(PAIR, Broken(tmp_path, how, original=True), RECIPE, executor=worker, method="trained")
    assert trainings_in(tmp_path) == 0
    (keys,) = worker.runs  # of all jobs: workers are started once
    assert len(keys) == 1 + len(PAIR.flagged_spans())


@pytest.mark.parametrize(("how", "text"), [UNREADABLE, INFINITE, (too_large, "out of memory: the images do not fit")])
def test_no_training_runs_if_the_original_cannot_be_scored(tmp_path, how, text):
    run = tmp_path / "run"
    broken = Broken(tmp_path, how, original=True)
    with pytest.raises(TableError, match=f"^The task fails for the original network: {text}") as raised:
        measure_importance(PAIR, broken, RECIPE, run=run, method="trained")
    assert str(raised.value).endswith("Correct the task or its data, and run again.")
    assert trainings_in(tmp_path) == 0
    assert len(records(run)) == 1
    broken.original = None  # repaired: it is scored again without retry=True
    table = measure_importance(PAIR, broken, RECIPE, run=run, method="trained")
    assert table.base == BASE
    assert len(table.importances) == len(table.entries)


def test_table_without_any_score_is_an_error(tmp_path):
    text = (
        r"Every measurement failed. The first failure: \(0, 1\], flags 11: error: OSError: the disk is gone .*\. "
        r"Correct this, and run again with retry=True \(--retry\)\.$"
    )
    with pytest.raises(TableError, match=text):
        measure_importance(PAIR, Broken(tmp_path, unreadable, original=False), RECIPE, method="trained")


def test_message_has_one_full_stop_after_the_reason(tmp_path):
    fates = tuple((importance_plan(PAIR.network, block), "nan") for block in PAIR.flagged_spans())
    with pytest.raises(TableError, match=r"gradient \(clip\)\. Correct this, and run again"):
        measure_importance(PAIR, TinyTask(folder=str(tmp_path), fates=fates), RECIPE, method="trained")


def test_block_with_some_failed_trainings_gives_a_warning(tmp_path):
    plan = importance_plan(PAIR.network, FlaggedSpan(0, 2, True, True))
    run, failing = tmp_path / "run", TinyTask(folder=str(tmp_path), fates=((plan, "nan"),))
    whole = TinyTask(folder=str(tmp_path))
    with pytest.warns(IncompleteTable, match="1 block of 3 could not be measured; no plan will use them"):
        measure_importance(PAIR, failing, RECIPE, run=run, method="trained")
    text = r"^1 block of 3 could not be measured with every seed:\n  \(0, 2\], flags 11: 1 of 2 measurements\nTo run"
    with pytest.warns(IncompleteTable, match=text):
        table = measure_importance(PAIR, whole, RECIPE, seeds=2, run=run, method="trained")
    entry = next(entry for entry in table.entries if (entry.span.i, entry.span.j) == (0, 2))
    assert (entry.seeds, len(entry.samples), entry.reason) == ((6,), 1, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = measure_importance(PAIR, whole, RECIPE, seeds=2, run=run, retry=True, method="trained")
    assert again == measure_importance(PAIR, whole, RECIPE, seeds=2, method="trained")


@pytest.mark.parametrize("method", ["trained", "brief"])
def test_score_with_global_random_numbers_is_reproducible(method):
    def score(model, split):
        return torch.rand(()).item()

    task = FunctionTask(loss=TinyTask().loss, score=score)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = measure_importance(PAIR, task, RECIPE, method=method)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert measure_importance(PAIR, task, RECIPE, method=method) == one


@pytest.mark.parametrize("context", [torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()])
@pytest.mark.parametrize("method", ["trained", "brief"])
def test_surrounding_context_changes_nothing(context, method):
    expected = measure_importance(NETWORK, TinyTask(), RECIPE, method=method)
    with context:
        assert measure_importance(NETWORK, TinyTask(), RECIPE, method=method) == expected


def test_recipe_of_the_paper_and_progress():
    events = []

    def progress(what, total, done):
        events.append((what, total, done))
        return lambda: events.append("one more")

    def no_loss(model, step):
        raise ValueError(str((step.recipe.lr, step.recipe.crop)))

    task = FunctionTask(loss=no_loss, score=lambda model, split: 1.0, epoch_steps=1)
    with pytest.raises(TableError, match=r"ValueError: \(0\.1, 'resized'\)"):
        measure_importance(PAIR, task, progress=progress, method="trained")
    assert events == [("trainings", 4, 0), *["one more"] * 4]


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_freed_after_a_training_even_if_it_fails(fails):
    seen = []

    def loss(model, step):
        seen.extend(weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers()))
        if step.number == 2 and fails:
            raise ValueError("on purpose")
        return TinyTask().loss(model, step)

    task = FunctionTask(loss=loss, score=TinyTask().score)
    work = EntrySetup(PAIR, task, Method.of("trained", RECIPE))()
    gc.disable()  # the weights must be freed without it: the next training needs the memory
    try:
        with contextlib.suppress(ValueError):
            work((BlockOption(FlaggedSpan(0, 2, True, True)), 0))
        assert seen
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()
