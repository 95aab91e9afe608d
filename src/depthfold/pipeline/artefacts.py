"""The artefacts of a run: tables, plan, students, result and profiles. Each is reused if its inputs are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from depthfold.backends import Backend, get
from depthfold.core import (
    Budget,
    Environment,
    Frontier,
    ImportanceTable,
    LatencyTable,
    MeasuredSpeedup,
    Plan,
    Profiles,
    SolvedPlan,
    Surrogate,
    require_moves,
)
from depthfold.core.options import MERGE
from depthfold.errors import RunError, VerificationError
from depthfold.exporting import save
from depthfold.importance import Method, importance_options, left_out_options, measure_importance
from depthfold.importance.journal import importance_depends_on
from depthfold.latency import choose, measure_latency
from depthfold.latency.journal import latency_depends_on
from depthfold.merging import merge
from depthfold.pipeline.options import Options
from depthfold.pipeline.shipping import warn_about_old_files
from depthfold.pipeline.surrogate import fit_surrogate, surrogate_depends_on
from depthfold.progress import Progress
from depthfold.reporting import Findings, report
from depthfold.rewriting import rewrite
from depthfold.store import RunFolder
from depthfold.store.run_folder import (
    CHECKED_IMAGES,
    FINDINGS,
    GIVEN,
    IMPORTANCE,
    LATENCY,
    PLAN,
    PROFILES,
    REPORT,
    RESULT,
    STUDENTS,
    SURROGATE,
)
from depthfold.support.digest import digest
from depthfold.support.document import decode
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe, Task, preset
from depthfold.version import __version__


def make_latency_table(
    folder: RunFolder, traced: TracedNetwork, target: str | Backend, options: Options, progress: Progress | None
) -> LatencyTable:
    """Return the latency table of the run; measure it if none is given and it was not made from the same inputs.

    A finished table is kept: a new one would also be calibrated with the plans that choose() has timed since, and
    another plan might be chosen. With `retry`, failed entries are measured again, and the table is replaced if any of
    them now has a time.
    """
    if options.latency is not None:
        folder.write(LATENCY, options.latency, {GIVEN: digest(options.latency.to_json())})
        return options.latency
    made_from = _latency_made_from(traced, target, options)
    found = folder.find(LATENCY, LatencyTable, made_from)
    if found is not None and not (options.retry and len(found.shape_times) < len(found.entries)):
        return found
    table = measure_latency(
        traced, target, space=options.space, moves=options.moves, run=folder.path, retry=options.retry,
        progress=progress,
    )  # fmt: skip
    if found is not None and table.shape_times.keys() == found.shape_times.keys():
        return found
    folder.write(LATENCY, table, made_from)
    return table


def find_latency_table(
    folder: RunFolder, traced: TracedNetwork, target: str | Backend, options: Options
) -> LatencyTable | None:
    """Return the latency table of the run if it was made from the same inputs. Nothing is measured or written."""
    return folder.find(LATENCY, LatencyTable, _latency_made_from(traced, target, options))


def _latency_made_from(traced: TracedNetwork, target: str | Backend, options: Options) -> dict[str, object]:
    environment = get(target).environment(traced.example_tensors())
    return latency_depends_on(traced, environment) | _search_space(options)


def make_importance_table(
    folder: RunFolder,
    traced: TracedNetwork,
    task: Task,
    options: Options,
    progress: Progress | None,
    latency: LatencyTable | None = None,
    before_training: Callable[[], object] = lambda: None,
) -> ImportanceTable:
    """Return the importance table of the run; measure what its journal lacks if it was not made from the same inputs.

    With a latency table, blocks that save no time are left out. A table with failed entries is made again, which warns
    about them and, with `retry`, measures them again. `before_training` is called before that and may raise.
    """
    method = Method.of(options.importance_method, options.importance_recipe, options.reinit)
    left_out = left_out_options(
        traced.network, importance_options(traced, options.space, options.moves), method, latency
    )
    made_from = importance_depends_on(traced, task, method) | _search_space(options)
    made_from |= {"left out": digest([str(option) for option in sorted(left_out)]) if left_out else None}
    found = folder.find(IMPORTANCE, ImportanceTable, made_from)
    if found is not None and all(
        entry.reason is None or (entry.span, entry.dropped) in left_out for entry in found.entries
    ):
        return found
    before_training()
    table = measure_importance(
        traced, task, method.recipe, method=method.name, latency=latency, space=options.space, moves=options.moves,
        reinit=options.reinit, executor=options.executor, run=folder.path, retry=options.retry, progress=progress,
    )  # fmt: skip
    folder.write(IMPORTANCE, table, made_from)
    return table


def _search_space(options: Options) -> dict[str, object]:
    """Return the search space and the moves. The paper's moves alone have no record, as before there were others."""
    moves = require_moves(options.moves)
    return {"space": options.space} | ({} if moves == MERGE else {"moves": moves})


def make_surrogate(
    folder: RunFolder,
    traced: TracedNetwork,
    task: Task,
    tables: tuple[LatencyTable, ImportanceTable],
    options: Options,
    progress: Progress | None,
) -> Surrogate:
    """Return the surrogate of the run; train the plans that its journal lacks if it was not fitted to these tables."""
    latency, importance = tables
    recipe = preset("plans")
    made_from = surrogate_depends_on(traced, task, recipe) | _digests(tables)

    def build() -> Surrogate:
        return fit_surrogate(
            traced, task, latency, importance, recipe, executor=options.executor, run=folder.path, progress=progress
        )

    return folder.make(SURROGATE, Surrogate, made_from, build)


def fitted_surrogate(folder: RunFolder, tables: tuple[LatencyTable, ImportanceTable], command: str) -> Surrogate:
    """Return the surrogate of the run. Raise RunError with the command that fits one if it is not of these tables."""
    found, made_from = folder.need(SURROGATE, Surrogate, command), folder.made_from(SURROGATE) or {}
    for name, present in _digests(tables).items():
        if made_from.get(name) != present:
            raise RunError(
                f"The surrogate in {folder.path} was fitted to another {name} table than the present one. "
                f"Run: {command}"
            )
    return found


def _digests(tables: tuple[LatencyTable, ImportanceTable]) -> dict[str, str]:
    latency, importance = tables
    return {"latency": digest(latency.to_json()), "importance": digest(importance.to_json())}


def keep_checked_images(folder: RunFolder, checked: Mapping[str, str]) -> None:
    """Record that these image files can be read, so that the next command does not read them again."""
    if checked:
        with folder.making(CHECKED_IMAGES, checked):
            pass  # there is only the record


def keep_importance(folder: RunFolder, table: ImportanceTable) -> None:
    """Make a table that the user gave the importance table of the run."""
    folder.write(IMPORTANCE, table, {GIVEN: digest(table.to_json())})


def choose_plan(
    folder: RunFolder,
    traced: TracedNetwork,
    frontier: Frontier,
    budget: Budget,
    target: str | Backend,
    progress: Progress | None,
) -> SolvedPlan:
    """Return the plan that choose() finds; reuse the one that it found for the same frontier, budget and environment.

    Only a plan that merges is kept, so that no later stage has to check that before a training.
    """

    def build() -> SolvedPlan:
        plan = choose(traced, frontier, budget, target, run=folder.path, progress=progress)
        _check_merges(traced, plan, budget)
        return plan

    plans = [(one.latency, one.importance, *one.plan.digest_parts) for one in frontier.plans]
    environment = get(target).environment(traced.example_tensors())
    made_from = {"budget": str(budget), "environment": environment, "frontier": digest(plans)}
    return folder.make(PLAN, SolvedPlan, made_from, build)


def chosen_plan(folder: RunFolder, command: str) -> tuple[SolvedPlan, Budget]:
    """Return the plan of the run and its budget. Raise RunError with the command that chooses one if there is none."""
    plan, made_from = folder.need(PLAN, SolvedPlan, command), folder.made_from(PLAN)
    if made_from is None:
        raise RunError(f"The run folder {folder.path} has no {PLAN} yet. Run: {command}")
    return plan, Budget.parse(made_from["budget"])


def chosen_in(folder: RunFolder) -> Environment:
    """Return the environment in which the plan of the run met its budget."""
    made_from = folder.made_from(PLAN)
    return Environment() if made_from is None else decode(Environment, json.loads(made_from["environment"]), PLAN)


def student_folder(folder: RunFolder, plan: Plan, recipe: Recipe | str, *, distil: bool) -> Path:
    """Return the folder in which the student of a plan is trained. Each plan and recipe has its own."""
    return folder.path / STUDENTS / digest(*plan.digest_parts, _resolved(recipe).to_json(), distil)


def save_result(
    folder: RunFolder, shallow: nn.Module, plan: SolvedPlan, student: Path, exports: Iterable[str] = ()
) -> None:
    """Save the merged network, made from this plan and student, of which `exports` will be written.

    If there was another result, delete its findings and its report, and warn about its other exported files.
    """
    made_from = {"plan": str(plan.plan), "student": student.name}
    if folder.made_from(RESULT) != made_from:
        folder.forget(FINDINGS)
        folder.forget(REPORT)
        warn_about_old_files(folder.path, exports)
    with folder.making(RESULT, made_from) as path:
        save(shallow, path)


def make_profiles(
    folder: RunFolder, traced: TracedNetwork, plan: Plan, target: str | Backend, measure: Callable[[], Profiles]
) -> Profiles:
    """Return the profiles of the run; measure them if they were not made from the same inputs.

    They do not depend on the weights: a student that was trained with another recipe has the same profile. Those that
    are unreliable, because something else was running, are measured again.
    """
    versions = {"depthfold": __version__, "torch": str(torch.__version__)}  # PyTorch measures the memory
    environment = get(target).environment(traced.example_tensors())
    made_from = latency_depends_on(traced, environment) | {"plan": digest(*plan.digest_parts), "versions": versions}
    known = folder.find(PROFILES, Profiles, made_from)
    if known and MeasuredSpeedup(original=known.before.quartiles, network=known.after.quartiles).unreliable:
        folder.forget(PROFILES)
    return folder.make(PROFILES, Profiles, made_from, measure)


def find_findings(folder: RunFolder) -> Findings | None:
    """Return the findings about the result of the run; None if it was not evaluated."""
    return folder.find(FINDINGS, Findings, _findings_inputs(folder))


def _findings_inputs(folder: RunFolder) -> dict[str, object]:
    return {"plan": folder.made_from(PLAN), "result": folder.made_from(RESULT)}


def keep_findings(folder: RunFolder, findings: Findings) -> Path:
    """Write the findings about the result of the run, and their report. Return the path of the report."""
    folder.write(FINDINGS, findings, _findings_inputs(folder))
    return report(findings, folder.path / REPORT)


def _resolved(recipe: Recipe | str) -> Recipe:
    return preset(recipe) if isinstance(recipe, str) else recipe


def _check_merges(traced: TracedNetwork, plan: SolvedPlan, budget: Budget) -> None:
    """Merge the plan with the present weights: choose() times random weights, and compares no outputs."""
    try:
        merge(rewrite(traced, plan))
    except VerificationError as error:
        raise VerificationError(
            f"The plan for the budget of {budget} cannot be used, and nothing was trained for it. {error} Try another "
            "budget, whose plan may merge, or leave out the layers that do not merge with ignore=... (--ignore), in "
            "another run folder."
        ) from error
