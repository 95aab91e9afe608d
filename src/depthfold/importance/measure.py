"""measure_importance(): the table I[i, j, a, b], with one job per block, or one for a group of blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from depthfold.core import BlockOption, ImportanceTable, LatencyTable, Move, Score, Space
from depthfold.core.importance_table import ACCURACY
from depthfold.core.options import MERGE
from depthfold.errors import InvalidValue, TableError
from depthfold.importance.entry import (
    BASE,
    Comparison,
    EntrySetup,
    Group,
    base_job,
    job_key,
    jobs_of,
    make_groups,
    make_job,
)
from depthfold.importance.journal import ImportanceJournal, importance_depends_on
from depthfold.importance.methods import Method, MethodName
from depthfold.importance.options import importance_options, is_unchanged, left_out_options, shared_measurements
from depthfold.importance.table_warnings import warn_about_holdout, warn_if_incomplete
from depthfold.jobs import Executor, Failure, InProcess, Job, Outcome, check_is_executor
from depthfold.progress import Progress, Tick, note, progress_bars
from depthfold.support.coerce import as_whole
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork, require_traced
from depthfold.training import OutputTask, Recipe, Task, check_has_holdout, check_task, task_name


def measure_importance(
    traced: TracedNetwork,
    task: Task,
    recipe: Recipe | str | None = None,
    *,
    method: MethodName = "brief",
    latency: LatencyTable | None = None,
    executor: Executor | None = None,
    run: str | Path | None = None,
    space: Space = "paper",
    moves: Iterable[Move] = MERGE,
    seeds: int = 1,
    reinit: bool | None = None,
    retry: bool = False,
    progress: Progress | None = None,
) -> ImportanceTable:
    """Measure the importance I[i, j, a, b] of every block of the search space (Eq. 14).

    For each block and seed, a network is made without the activations inside the block and with those that the flags a
    and b ask for at its ends. Its score on the hold-out set minus that of the unchanged network is the importance. The
    `method` says how the network recovers before it is scored:

    - "brief", the default: it learns the outputs of the original for a few steps, then its batch norms are
      recalibrated.
    - "trained": it is trained with the task's loss, as in the paper.
    - "recalibrated": only its batch norms are recalibrated.
    - "local": only the block is trained, to reproduce the original's values at j. Then as above.
    - "fit": the block becomes one convolution, computed by least squares. Then as above.

    "brief" and "trained" use the task's score. The other methods compare the outputs with those of the original if the
    task can do that (OutputTask), which needs no labels and fewer images, and otherwise also use the score.

    With the `moves` "drop-layers" and "drop-branches", a block also has an entry for each other convolution that it can
    become without some of its layers, and without the branch of a residual. Of several sets of dropped layers that
    leave the same shape, the one is measured whose kept layers have the largest sum of weights. The weight of a layer
    is the mean absolute value of its kernel with the batch norm folded in. The block with dropped layers recovers by
    the same method; if nothing is left of it, "local" and "fit" have nothing to train or fit.

    `recipe` may be the name of a preset; by default it is the preset of the method. The n-th measurement of a block
    uses the recipe's seed plus n. With a `latency` table, blocks whose merging saves no time are not measured, unless
    layers are reinitialised. Drops that save no time are not measured either: see `useless_options`. This changes no
    optimal plan of solve() if keeping an activation or dropping less never lowers the importance.

    With `reinit`, the default of "trained" and possible only there, a block of one layer is reinitialised before its
    training, as in the paper. Use reinit=False with short trainings: a layer that has not recovered after a few steps
    would make merging it look cheap.

    The `executor` runs the jobs, by default in this process. Each result depends only on the block and its seed. With a
    run folder, `run`, every result is written to a journal, and the next call runs only what is missing. A block that
    fails has a reason instead of a score, and a warning lists it; `retry` measures these again.
    """
    chosen = Method.of(method, recipe, reinit)
    executor = InProcess() if executor is None else executor
    _check_arguments(traced, task, executor)
    seeds = as_whole("The number of seeds", seeds, InvalidValue)
    every_seed = tuple(chosen.recipe.seed + n for n in range(seeds))
    network, options = traced.network, importance_options(traced, space, moves)
    left_out = left_out_options(network, options, chosen, latency)
    unchanged = [] if chosen.name == "trained" else [option for option in options if is_unchanged(network, option)]
    without = {*left_out, *unchanged}
    measured_as = shared_measurements(network, [option for option in options if option not in without], chosen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # inference tensors cannot be trained
        journal = stack.enter_context(ImportanceJournal(run, importance_depends_on(traced, task, chosen)))
        progress = progress or stack.enter_context(progress_bars("Importance table"))
        measurement = _Measurement(EntrySetup(traced, task, chosen), executor, journal, retry=retry)
        bases = measurement.run(tuple(dict.fromkeys(measured_as.values())), every_seed, progress)
    entries = [Score(span=block, dropped=dropped, reason=reason) for (block, dropped), reason in left_out.items()]
    entries += [Score(span=block, samples=bases, seeds=every_seed) for block, _ in unchanged]
    by_seed = dict(zip(every_seed, bases if len(bases) == seeds else bases * seeds, strict=True))
    entries += [_entry(option, measured, by_seed, journal) for option, measured in measured_as.items()]
    table = ImportanceTable(
        network=network.name,
        fingerprint=network.fingerprint,
        base=fmean(bases),
        provenance=f"{task_name(task)}; seeds {', '.join(map(str, every_seed))}; {chosen}{_scored_by(task, chosen)}",
        quantity=_quantity(task, chosen),
        entries=tuple(entries),
    )
    warn_if_incomplete(table, seeds, left_out)
    warn_about_holdout(table, task, _comparisons(measured_as, every_seed, journal))
    return table


def _scored_by(task: Task, method: Method) -> str:
    if not (method.compares_outputs and isinstance(task, OutputTask)):
        return ""
    return "; scores are minus the divergence from the original's outputs"


def _quantity(task: Task, method: Method) -> str:
    """Return the name and the unit of the scores, or an empty text if only the task knows them."""
    if method.compares_outputs and isinstance(task, OutputTask):
        return "the agreement with the original's outputs (minus the divergence)"
    return ACCURACY if isinstance(task, ClassificationTask) else ""


class _Measurement:
    """Runs the jobs that the journal lacks."""

    def __init__(self, setup: EntrySetup, executor: Executor, journal: ImportanceJournal, *, retry: bool) -> None:
        self.setup, self.executor, self.journal, self.retry = setup, executor, journal, retry

    def run(self, options: Sequence[BlockOption], seeds: Sequence[int], progress: Progress) -> tuple[float, ...]:
        """Measure all blocks with all seeds, and return the scores of the original network.

        It has one score for each seed, or for "trained" only one. Raise TableError if it cannot be scored.
        """
        trained = self.setup.method.name == "trained"
        bases = [base_job(seed, seeds[0]) for seed in (seeds[:1] if trained else seeds)]
        first = [job for job in bases if job.key not in self.journal.results]
        missing = {seed: [option for option in options if self._is_missing(job_key(option, seed))] for seed in seeds}
        number, left = len(options) * len(seeds) + len(bases), sum(map(len, missing.values())) + len(first)
        step = progress("trainings" if trained else "blocks", number, number - left)
        if trained and isinstance(self.executor, InProcess):  # workers would have to be started twice
            self._run(first, step)  # separately: if it fails, hours of training would fail for the same reason
            first = []
        self._run([*first, *(job for seed in seeds for job in self._jobs(missing[seed], seed))], step)
        return tuple(self.journal.results[job.key]["score"] for job in bases)

    def _is_missing(self, key: str) -> bool:
        return self.journal.missing(key, retry=self.retry)

    def _jobs(self, options: Sequence[BlockOption], seed: int) -> list[Job]:
        if not self.setup.method.groups_blocks:
            return [make_job(option, seed) for option in options]
        return make_groups(options, seed)

    def _run(self, jobs: Sequence[Job], step: Callable[[], None]) -> None:
        """Run the jobs. A group that fails is run again block by block, because one block may have failed it."""
        groups = {job.key: job.payload for job in jobs if isinstance(job.payload, Group)}
        again: list[Job] = []
        with contextlib.closing(self.executor.run(self.setup, jobs)) as outcomes:
            for outcome in self._after_base(outcomes):
                group = groups.get(outcome.key)
                if group is not None and outcome.failure is not None:
                    again += jobs_of(group)
                    continue
                for single in [outcome] if group is None else _split(outcome, group):
                    self.journal.add(single)
                    self._note(single, step)
                    step()
        if again:
            self._run(again, step)

    def _note(self, outcome: Outcome, step: Tick) -> None:
        if outcome.failure is None:
            note(step, lambda: f"last score {self.journal.results[outcome.key]['score']:.4g}")

    def _after_base(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Yield the outcomes, but hold back failures until the original network is scored.

        If it cannot be scored, the blocks fail for the same reason, and must be measured again once that is corrected.
        """
        held: list[Outcome] = []
        for outcome in outcomes:
            is_base = outcome.key.startswith(BASE)
            if is_base and outcome.failure is not None:
                self.journal.add(outcome)
                raise TableError(
                    f"The task fails for the original network: {str(outcome.failure).rstrip('.')}. "
                    "Correct the task or its data, and run again."
                )
            if outcome.failure is not None and BASE not in self.journal.results:
                held.append(outcome)
                continue
            yield outcome
            if is_base:
                yield from held
                held = []


def _split(outcome: Outcome, group: Group) -> Iterator[Outcome]:
    """Yield the outcomes of the blocks of a group."""
    for job, result in zip(jobs_of(group), outcome.result, strict=True):
        failure = Failure(kind="not finite", message=result) if isinstance(result, str) else None
        yield replace(outcome, key=job.key, result=None if failure else result, failure=failure)


def _entry(option: BlockOption, measured: BlockOption, bases: Mapping[int, float], journal: ImportanceJournal) -> Score:
    """Return the entry of a block. `bases` has the score of the original for each seed."""
    block, dropped = option
    known = {seed: journal.results[key] for seed in bases if (key := job_key(measured, seed)) in journal.results}
    if not known:
        reasons = dict.fromkeys(journal.failures[job_key(measured, seed)] for seed in bases)
        return Score(span=block, dropped=dropped, reason="; ".join(reasons))
    # The table has the mean base of all seeds. If a seed failed for this block, the others may have another mean base.
    shift = fmean(bases.values()) - fmean(bases[seed] for seed in known)
    scores = tuple(result["score"] + shift for result in known.values())
    return Score(span=block, dropped=dropped, samples=scores, seeds=tuple(known))


def _comparisons(options: Iterable[BlockOption], seeds: Sequence[int], journal: ImportanceJournal) -> list[Comparison]:
    """Return the known standard errors of the scores of blocks of several layers."""
    keys = [job_key(option, seed) for option in options if len(option.block.span) > 1 for seed in seeds]
    results = [journal.results[key] for key in keys if key in journal.results]
    return [Comparison(error=one["error"], inputs=one["inputs"]) for one in results if "inputs" in one]


def _check_arguments(network: object, task: object, executor: object) -> None:
    require_traced(network, "measure_importance")
    check_task(task)
    check_has_holdout(task)
    check_is_executor(executor)
