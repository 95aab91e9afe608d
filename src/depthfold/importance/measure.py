"""measure_importance(): the table I[i, j, a, b], from one short training per block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from depthfold.core import FlaggedSpan, ImportanceTable, Network, Plan, Score, Space
from depthfold.errors import InvalidValue, TableError
from depthfold.importance.definition import importance_plan
from depthfold.importance.entry import BASE, EntrySetup, job_key, make_job
from depthfold.importance.journal import ImportanceJournal, importance_inputs
from depthfold.jobs import Executor, InProcess, Job, check_is_executor
from depthfold.progress import Progress, progress_bars
from depthfold.support.coerce import as_whole
from depthfold.support.text import count
from depthfold.tracing import TracedNetwork, require_traced
from depthfold.training import Recipe, Task, check_has_holdout, check_task, preset, task_name

NO_REINIT = "; reinit=False"  # in the provenance


class IncompleteTable(UserWarning):
    """Some trainings failed. A block without a score has a reason, and no plan uses it."""


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
    """Measure the importance I[i, j, a, b] of every block of the search space (Eq. 14).

    For each block and seed, the network is trained once, without the activations inside the block and with those that
    the flags a and b ask for at its ends, and scored on the hold-out set. The importance is the difference to the score
    of the original network. `recipe` may be the name of a preset. The n-th training of a block uses the recipe's seed
    plus n.

    With `reinit`, as in the paper, a block of one layer is reinitialised before its training. Use reinit=False with
    short trainings: a layer that has not recovered after a few steps would make merging it look cheap.

    The `executor` runs the trainings, by default in this process. Each result depends only on the block and its seed.
    With a run folder, `run`, every result is written to a journal, and the next call runs only what is missing. A block
    whose trainings fail has a reason instead of a score, and a warning lists it; `retry` runs these again.
    """
    recipe = preset(recipe) if isinstance(recipe, str) else recipe
    executor = InProcess() if executor is None else executor
    _check_arguments(traced, task, recipe, executor)
    seeds = as_whole("The number of seeds", seeds, InvalidValue)
    every_seed = tuple(recipe.seed + n for n in range(seeds))
    trained_as = _trained_as(traced.network, traced.flagged_spans(space), reinit=reinit)
    blocks = dict.fromkeys(trained_as.values())
    jobs = [Job(key=BASE, payload=None), *(make_job(block, seed) for block in blocks for seed in every_seed)]
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(ImportanceJournal(run, importance_inputs(traced, task, recipe, reinit=reinit)))
        progress = progress or stack.enter_context(progress_bars())
        _run(jobs, EntrySetup(traced, task, recipe, reinit), executor, journal, retry, progress)
    table = ImportanceTable(
        network=traced.network.name,
        fingerprint=traced.network.fingerprint,
        base=journal.results[BASE]["score"],
        provenance=f"{task_name(task)}; seeds {', '.join(map(str, every_seed))}; {recipe}{'' if reinit else NO_REINIT}",
        entries=tuple(_entry(block, trained, every_seed, journal) for block, trained in trained_as.items()),
    )
    _warn_if_incomplete(table, seeds)
    return table


def _trained_as(network: Network, blocks: Iterable[FlaggedSpan], *, reinit: bool) -> dict[FlaggedSpan, FlaggedSpan]:
    """Map every block to the block whose training it uses.

    Without `reinit`, blocks of one layer differ from the original network only in their activations, so all blocks with
    the same activations share one training.
    """
    first: dict[Plan, FlaggedSpan] = {}
    return {
        block: block if reinit or len(block.span) > 1 else first.setdefault(importance_plan(network, block), block)
        for block in blocks
    }


def _run(
    jobs: Sequence[Job],
    setup: EntrySetup,
    executor: Executor,
    journal: ImportanceJournal,
    retry: bool,
    progress: Progress,
) -> None:
    """Run the missing jobs. Raise TableError if the original network cannot be scored."""
    missing = [job for job in jobs if journal.missing(job.key, retry=retry or job.key == BASE)]
    step = progress("trainings", len(jobs), len(jobs) - len(missing))
    # Score the original network first, in a separate run: if this fails, all trainings would fail.
    for original in (True, False):
        with contextlib.closing(executor.run(setup, [job for job in missing if (job.key == BASE) == original])) as run:
            for outcome in run:
                journal.add(outcome)
                step()
        if BASE not in journal.results:
            raise TableError(
                f"The original network cannot be scored on the hold-out set: {journal.failures[BASE].rstrip('.')}. "
                "Correct the task or its data, and run again."
            )


def _entry(block: FlaggedSpan, training: FlaggedSpan, seeds: Sequence[int], journal: ImportanceJournal) -> Score:
    known = {seed: journal.results[key] for seed in seeds if (key := job_key(training, seed)) in journal.results}
    if not known:
        reasons = dict.fromkeys(journal.failures[job_key(training, seed)] for seed in seeds)
        return Score(span=block, reason="; ".join(reasons))
    return Score(span=block, samples=tuple(result["score"] for result in known.values()), seeds=tuple(known))


def _warn_if_incomplete(table: ImportanceTable, seeds: int) -> None:
    """Give an IncompleteTable warning if trainings failed. Raise TableError if all failed."""
    failed = [entry for entry in table.entries if entry.reason is not None]
    partly = [entry for entry in table.entries if 0 < len(entry.samples) < seeds]
    if len(failed) == len(table.entries):
        raise TableError(
            f"Every training failed. The first failure: {failed[0].span}: {str(failed[0].reason).rstrip('.')}. Correct "
            "this, and run again with retry=True (--retry)."
        )
    lines = []
    if failed:
        lines += [f"{count(len(failed), 'block')} of {len(table.entries)} could not be trained; no plan will use them:"]
        lines += [f"  {entry.span}: {entry.reason}" for entry in failed]
    if partly:
        lines += [f"{count(len(partly), 'block')} of {len(table.entries)} could not be trained with every seed:"]
        lines += [f"  {entry.span}: {len(entry.samples)} of {seeds} trainings" for entry in partly]
    if lines:
        lines += ["To run only these again, use retry=True with the same run=..., or --retry on the command line."]
        warnings.warn("\n".join(lines), IncompleteTable, stacklevel=3)


def _check_arguments(network: object, task: object, recipe: object, executor: object) -> None:
    require_traced(network, "measure_importance")
    check_task(task)
    check_has_holdout(task)
    check_is_executor(executor)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(f"measure_importance() takes a Recipe or the name of a preset, found {recipe!r:.80}.")
