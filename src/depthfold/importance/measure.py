"""measure_importance(): the table I[i, j, a, b], by one short training per block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from depthfold.core import FlaggedSpan, ImportanceTable, Network, Plan, Score
from depthfold.core.network import Space
from depthfold.errors import InvalidValue, TableError
from depthfold.importance.definition import importance_plan
from depthfold.importance.entry import BASE, EntrySetup, job_of, key_of
from depthfold.importance.journal import ImportanceJournal, importance_inputs
from depthfold.jobs import Executor, InProcess, Job, check_is_executor
from depthfold.progress import Progress, progress_bars
from depthfold.support.coerce import as_whole
from depthfold.support.text import count
from depthfold.tracing import TracedNetwork, expect_traced
from depthfold.training import Recipe, Task, expect_holdout, expect_task, preset, task_name

NO_REINIT = "; reinit=False"  # in the provenance


class IncompleteTable(UserWarning):
    """Some trainings failed for good. A block without any has a reason instead of a score, and no plan uses it."""


def measure_importance(
    traced: TracedNetwork,
    task: Task,
    recipe: Recipe | str = "importance",
    *,
    executor: Executor | None = None,
    run: str | Path | None = None,
    space: Space = "paper",
    seeds: int = 1,
    reinit: bool = True,
    retry: bool = False,
    progress: Progress | None = None,
) -> ImportanceTable:
    """Train the network once for every block of the search space and every seed, and score it on the hold-out set.

    For a block (i, j, a, b) the activations strictly inside go, those at its ends stand as a and b say, and the padding
    moves. The base score is that of the network as it is, on the same hold-out set. The recipe may be the name of a
    preset; the n-th training of a block has the recipe's seed plus n.

    With `reinit`, as in the paper, a block of one layer is reinitialised before its training. That needs trainings
    long enough for the layer to recover: after a few steps, layers that learn slowly look as if merging them cost
    nothing. With short trainings measure with reinit=False: an unchanged layer costs nothing.

    The trainings are jobs of the `executor` (in this process, unless another one is given); each result depends on the
    block and its seed alone. With a folder, `run`, each is kept as it comes: run again, only what is missing is done. A
    block whose trainings fail has the reason instead of a score, and a warning says so; `retry` runs just these again.
    """
    recipe = preset(recipe) if isinstance(recipe, str) else recipe
    executor = InProcess() if executor is None else executor
    _expect(traced, task, recipe, executor)
    seeds = as_whole("The number of seeds", seeds, InvalidValue)
    trainings = _trained_for(traced.network, traced.flagged_spans(space), reinit=reinit)
    drawn = tuple(recipe.seed + n for n in range(seeds))
    trained = dict.fromkeys(trainings.values())
    jobs = [Job(key=BASE, payload=None), *(job_of(block, seed) for block in trained for seed in drawn)]
    inputs = importance_inputs(traced, task, recipe, reinit=reinit)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(ImportanceJournal(run, inputs))
        bars = progress or stack.enter_context(progress_bars())
        _train(EntrySetup(traced, task, recipe, reinit), jobs, journal, executor, retry, bars)
    table = ImportanceTable(
        network=traced.network.name,
        fingerprint=traced.network.fingerprint,
        base=journal.results[BASE]["score"],
        provenance=f"{task_name(task)}; seeds {', '.join(map(str, drawn))}; {recipe}{'' if reinit else NO_REINIT}",
        entries=tuple(_entry(block, training, drawn, journal) for block, training in trainings.items()),
    )
    _tell_what_is_missing(table, seeds)
    return table


def _trained_for(network: Network, blocks: Iterable[FlaggedSpan], *, reinit: bool) -> dict[FlaggedSpan, FlaggedSpan]:
    """Map every block to the block whose training it uses.

    If blocks of one layer are not reinitialised, each is the original network but for its activations, and one
    training serves all that have the same activations.
    """
    first: dict[Plan, FlaggedSpan] = {}
    return {
        block: block if reinit or len(block.span) > 1 else first.setdefault(importance_plan(network, block), block)
        for block in blocks
    }


def _train(
    setup: EntrySetup,
    jobs: Sequence[Job],
    journal: ImportanceJournal,
    executor: Executor,
    retry: bool,
    progress: Progress,
) -> None:
    missing = [job for job in jobs if journal.missing(job.key, retry=retry or job.key == BASE)]
    step = progress("trainings", len(jobs), len(jobs) - len(missing))
    # The original by itself, before all others: it is not trained, and if not even this works, none of them will. Among
    # them it might be tried again last of all, as jobs are that lack memory or lose their worker.
    for original in (True, False):
        with contextlib.closing(executor.run(setup, [job for job in missing if (job.key == BASE) == original])) as run:
            for outcome in run:
                journal.add(outcome)
                step()
        if BASE not in journal.results:
            raise TableError(
                f"The original network cannot be scored on the hold-out set: {journal.failures[BASE].rstrip('.')}. "
                "Mend the task's score, or the data, and run again."
            )


def _entry(block: FlaggedSpan, training: FlaggedSpan, seeds: Sequence[int], journal: ImportanceJournal) -> Score:
    known = {seed: journal.results[key] for seed in seeds if (key := key_of(training, seed)) in journal.results}
    if not known:
        reasons = dict.fromkeys(journal.failures[key_of(training, seed)] for seed in seeds)
        return Score(span=block, reason="; ".join(reasons))
    return Score(span=block, samples=tuple(result["score"] for result in known.values()), seeds=tuple(known))


def _tell_what_is_missing(table: ImportanceTable, seeds: int) -> None:
    failed = [entry for entry in table.entries if entry.reason is not None]
    partly = [entry for entry in table.entries if 0 < len(entry.samples) < seeds]
    if len(failed) == len(table.entries):
        raise TableError(
            f"Every training failed. The first one: {failed[0].span}: {str(failed[0].reason).rstrip('.')}. Mend "
            "that, and run it again with retry=True, or with --retry on the command line."
        )
    lines = []
    if failed:
        lines += [
            f"{count(len(failed), 'block')} of {len(table.entries)} could not be trained, and no plan will use them:",
            *(f"  {entry.span}: {entry.reason}" for entry in failed),
        ]
    if partly:
        lines += [
            f"{count(len(partly), 'block')} of {len(table.entries)} could not be trained as often as asked for:",
            *(f"  {entry.span}: {len(entry.samples)} of {seeds} trainings" for entry in partly),
        ]
    if lines:
        lines.append(
            "To try just these, run it again with retry=True and the same run=..., or with --retry on the command line."
        )
        warnings.warn("\n".join(lines), IncompleteTable, stacklevel=3)


def _expect(network: object, task: object, recipe: object, executor: object) -> None:
    expect_traced(network, "measure_importance")
    expect_task(task)
    expect_holdout(task)
    check_is_executor(executor)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(f"measure_importance() takes a Recipe or the name of one, found {recipe!r:.80}.")
