"""The methods of measure_importance(): their arguments, their journals, groups of blocks, and blocks left out."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

import depthfold as df
from depthfold.core import FlaggedSpan
from depthfold.errors import InvalidValue, JournalError, TableError
from depthfold.importance import (
    IncompleteTable,
    entry,
    importance_plan,
    importance_student,
    measure_importance,
)
from depthfold.importance.methods import RECALIBRATION
from depthfold.stage_one import SAVES_NO_TIME
from depthfold.training import FunctionTask, recalibrate, train
from tables import latency_table
from tiny_importance import RECIPE, SIZE, UNCHANGED, Pair, TinyTask, batch, holdout_score, scores_in, tiny_network

NETWORK = tiny_network()
PAIR = df.trace(Pair(), torch.zeros(1, 2, SIZE, SIZE))
CHEAP = ("brief", "recalibrated", "local", "fit")


def loss(model, step):
    """Return the cross-entropy, and the distance from the teacher's outputs if there is one."""
    x, y = batch(step.seed, step.number)
    outputs = model(x)
    return F.cross_entropy(outputs, y) if step.teacher is None else F.mse_loss(outputs, step.teacher(x))


DISTILLING = FunctionTask(loss=loss, score=TinyTask().score)


def keys_in(run):
    lines = (run / "importance.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["key"] for line in lines]


def test_brief_learns_from_the_original_and_recalibrates():
    table = measure_importance(NETWORK, DISTILLING, RECIPE, method="brief")
    teacher = df.rewrite(NETWORK, NETWORK.vanilla).eval()

    def treated(student):
        train(student, DISTILLING, RECIPE, teacher=teacher, split=None)
        recalibrate(student, DISTILLING, RECIPE, steps=range(3, 7), seed=RECIPE.seed)
        return holdout_score(student.eval())

    for each in (FlaggedSpan(0, 3, True, True), FlaggedSpan(2, 3, True, True), FlaggedSpan(0, 1, True, True)):
        found = next(entry for entry in table.entries if entry.span == each)
        assert found.samples == (treated(importance_student(NETWORK, each, 0, reinit=False)),)
    # The unchanged network also recovers from the same treatment, so that it can be compared.
    assert table.base == treated(df.rewrite(NETWORK, NETWORK.vanilla)) != holdout_score(teacher)


def test_recalibrated_trains_nothing():
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method="recalibrated")
    for found in table.entries:
        student = df.rewrite(NETWORK, importance_plan(NETWORK.network, found.span))
        recalibrate(student, TinyTask(), RECIPE, steps=range(3), seed=RECIPE.seed)
        assert found.samples == (holdout_score(student.eval()),)


@pytest.mark.parametrize("method", CHEAP)
def test_default_recipe_and_provenance(method):
    seen = []

    def watched(model, step):
        seen.append((step.number, step.recipe))
        return loss(model, step)

    table = measure_importance(PAIR, FunctionTask(loss=watched, score=TinyTask().score, identity="own"), method=method)
    recipe = df.training.preset(method)
    afterwards = 0 if method == "recalibrated" else RECALIBRATION
    assert {number for number, _ in seen} == set(range(recipe.steps + afterwards))
    assert {used for _, used in seen} == {recipe}
    batches = f"; recalibrated on {RECALIBRATION} batches" if afterwards else ""
    assert table.provenance == f"own; seeds 0; {method}; {recipe}{batches}"


def test_journal_of_another_method_is_refused(tmp_path):
    measure_importance(PAIR, TinyTask(), RECIPE, method="local", run=tmp_path)
    for method in ("brief", "fit"):
        with pytest.raises(JournalError, match=rf"other inputs \(method: local there, {method} here\)"):
            measure_importance(PAIR, TinyTask(), RECIPE, method=method, run=tmp_path)
    with pytest.raises(JournalError, match=r"\(method: local there, recalibrated here; recalibration: 4 there, none"):
        measure_importance(PAIR, TinyTask(), RECIPE, method="recalibrated", run=tmp_path)
    with pytest.raises(JournalError, match=r"method: local there, trained here; reinit: False there, True here"):
        measure_importance(PAIR, TinyTask(), RECIPE, run=tmp_path, method="trained")


def test_wrong_arguments_are_refused():
    def refused(text, **options):
        with pytest.raises(InvalidValue, match=text):
            measure_importance(PAIR, TinyTask(), options.pop("recipe", RECIPE), **options)

    known = "The methods are 'trained', 'brief', 'recalibrated', 'local', 'fit'.$"
    refused(f"^There is no method 'locl'. Did you mean 'local'\\? {known}", method="locl")
    refused(f"^There is no method None. {known}", method=None)
    for method in CHEAP:
        refused(
            f"^The method '{method}' reinitialises no layer; only \"trained\" does. Leave out",
            method=method,
            reinit=True,
        )
    refused(
        r'^The method "brief" scores the network only once, .*, or method="trained" \(--method trained\)\.$',
        method="brief",
        recipe=RECIPE.replace(keep="best"),
    )
    measure_importance(PAIR, TinyTask(), RECIPE, method="recalibrated", reinit=False)


def test_groups_have_a_line_per_block_and_resume(tmp_path, monkeypatch):
    run = tmp_path / "run"
    right = measure_importance(NETWORK, TinyTask(), RECIPE, method="local")
    monkeypatch.setattr(entry, "TOGETHER", 3)
    events = []

    def progress(what, total, done):
        events.append((what, total, done))
        return lambda: events.append("one more")

    task = TinyTask(folder=str(tmp_path))
    assert measure_importance(NETWORK, task, RECIPE, method="local", run=run, progress=progress) == right
    # The unchanged network, and thirteen blocks that differ from it. The other five are not measured.
    assert events == [("blocks", 14, 0), *["one more"] * 14]
    keys = keys_in(run)
    assert len(keys) == len(set(keys)) == 14
    # Without some lines, only those blocks are measured again, in other groups.
    journal = run / "importance.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    gone = [n for n in range(3, len(lines)) if n % 3]
    journal.write_text("".join(line for n, line in enumerate(lines) if n not in gone))
    before = scores_in(tmp_path)
    assert measure_importance(NETWORK, task, RECIPE, method="local", run=run) == right
    again = scores_in(tmp_path) - before
    assert sorted(again) == sorted(repr(json.loads(lines[n])["result"]["score"]) for n in gone)


def test_a_failure_in_a_group_is_that_of_one_block(monkeypatch, tmp_path):
    right = {each.span: each for each in measure_importance(NETWORK, TinyTask(), RECIPE, method="local").entries}
    bad = FlaggedSpan(1, 3, True, False)

    class Failing(TinyTask):
        def score(self, model, split):
            score = super().score(model, split)
            if (score,) == right[bad].samples:
                if (tmp_path / "raises").exists():
                    raise ValueError("on purpose")
                return math.nan
            return score

    with pytest.warns(IncompleteTable, match="1 block of 18 could not be measured"):
        table = measure_importance(NETWORK, Failing(folder=str(tmp_path)), RECIPE, method="local")
    (failed,) = [each for each in table.entries if each.reason]
    assert failed.span == bad and failed.reason.startswith("not finite: The score of the network is nan")
    assert set(scores_in(tmp_path).values()) == {1}
    assert [each for each in table.entries if each is not failed] == [right[s] for s in right if s != bad]

    (tmp_path / "raises").touch()  # this fails the whole group, and then only the block
    with pytest.warns(IncompleteTable, match="error: ValueError: on purpose"):
        table = measure_importance(NETWORK, Failing(folder=str(tmp_path)), RECIPE, method="local")
    assert [each.span for each in table.entries if each.reason] == [bad]
    assert [each for each in table.entries if not each.reason] == [right[s] for s in right if s != bad]


def test_diverging_block_of_a_group_has_a_reason():
    def huge(model, step):
        x, y = batch(step.seed, step.number)
        return F.cross_entropy(model(x * 1e30), y)

    with pytest.warns(
        IncompleteTable, match=r"\(0, 3\], flags 11: not finite: The loss is (nan|inf) after 3 steps. Use a"
    ):
        measure_importance(NETWORK, FunctionTask(loss=huge, score=TinyTask().score), RECIPE, method="local")


def test_each_seed_has_a_sample_in_groups(monkeypatch):
    monkeypatch.setattr(entry, "TOGETHER", 4)
    table = measure_importance(NETWORK, TinyTask(), RECIPE, method="local", seeds=2)
    for each in table.entries:
        first, second = each.samples
        assert first != second
        assert ((first + second) / 2 == table.base) == (each.span in UNCHANGED)


def test_block_that_failed_with_one_seed_is_compared_with_the_base_of_the_others():
    whole = measure_importance(NETWORK, TinyTask(), RECIPE, method="local", seeds=2)
    right = {each.span: each for each in whole.entries}
    bad = FlaggedSpan(1, 3, True, False)

    class Failing(TinyTask):
        def score(self, model, split):
            score = super().score(model, split)
            return math.nan if score == right[bad].samples[1] else score

    with pytest.warns(IncompleteTable, match=r"\(1, 3\]"):
        table = measure_importance(NETWORK, Failing(), RECIPE, method="local", seeds=2)
    first, second = right[next(iter(UNCHANGED))].samples  # the scores of the original
    expected = right[bad].samples[0] - first
    assert first != second and table.base == (first + second) / 2
    assert table.importances[bad] == pytest.approx(expected) != pytest.approx(right[bad].samples[0] - table.base)
    assert [each for each in table.entries if each.span != bad] == [right[span] for span in right if span != bad]


def test_blocks_that_save_no_time_are_left_out(tmp_path):
    spans = NETWORK.spans("paper")
    latency = latency_table(
        {(s.i, s.j): 0.5 if (s.i, s.j) == (1, 3) else float(len(s)) for s in spans},
        fingerprint=NETWORK.network.fingerprint,
    )
    task = TinyTask(folder=str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = measure_importance(NETWORK, task, RECIPE, method="recalibrated", latency=latency)
    left_out = {each.span for each in table.entries if each.reason == SAVES_NO_TIME}
    assert {(block.i, block.j) for block in left_out} < {(s.i, s.j) for s in spans if len(s) > 1} - {(1, 3)}
    assert left_out
    full = {each.span: each for each in measure_importance(NETWORK, TinyTask(), RECIPE, method="recalibrated").entries}
    assert all(each == full[each.span] for each in table.entries if each.span not in left_out)
    frontier = df.solve(latency, table, network=NETWORK.network)
    assert set(frontier.unscored) == left_out


def test_no_block_is_left_out_if_layers_are_reinitialised():
    latency = latency_table({(s.i, s.j): float(len(s)) for s in PAIR.spans("paper")})
    recipe = RECIPE.replace(steps=1)
    assert all(
        each.samples for each in measure_importance(PAIR, TinyTask(), recipe, latency=latency, method="trained").entries
    )
    kept = measure_importance(PAIR, TinyTask(), recipe, latency=latency, reinit=False, method="trained")
    assert [each.span for each in kept.entries if each.reason == SAVES_NO_TIME] == [FlaggedSpan(0, 2, True, True)]


def test_latency_table_of_another_network_is_an_error(tmp_path):
    other = latency_table({(0, 1): 1.0, (1, 2): 1.0}, fingerprint=PAIR.network.fingerprint)
    with pytest.raises(TableError, match=r"^The latency table is not of the network 'Tiny': the network has 5 layers"):
        measure_importance(NETWORK, TinyTask(), RECIPE, latency=other, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
