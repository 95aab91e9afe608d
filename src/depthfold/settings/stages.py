"""The stages of compress(), one command at a time, over the run folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from depthfold.backends import Layout, get
from depthfold.backends.raw_images import require_layout
from depthfold.core import (
    Budget,
    Frontier,
    ImportanceTable,
    LatencyTable,
    Network,
    SolvedPlan,
    Surrogate,
    require_moves,
)
from depthfold.errors import CheckpointError, DataError, DepthfoldError, RunError
from depthfold.exporting import Exported, load
from depthfold.finetuning import FOLDER as FINETUNING
from depthfold.finetuning import finetune, finetuned
from depthfold.importance import Method
from depthfold.latency import measure_latency, profile, side_by_side
from depthfold.latency.cost import MeasuringCost, measuring_cost
from depthfold.merging import Verification, merge, verify
from depthfold.pipeline import Compressed, Options, artefacts, compress, shipping
from depthfold.pipeline.evaluation import Networks, Solution, before_and_after, evaluate, score_original
from depthfold.pipeline.feasibility import LatencyCheck, check_trusted
from depthfold.pipeline.preflight import check_images, check_latency, checked_inputs, checked_options
from depthfold.pipeline.prospects import Prospects, prospects
from depthfold.reporting import Findings
from depthfold.rewriting import rewrite
from depthfold.settings.data import make_recipe
from depthfold.settings.executors import make_executor
from depthfold.settings.session import Session
from depthfold.settings.settings import Settings
from depthfold.solver import solve
from depthfold.store import HeaderMismatch, RunFolder
from depthfold.store.run_folder import GIVEN, IMPORTANCE, LATENCY, NETWORK, PLAN, PROFILES, RESULT, STUDENTS
from depthfold.tasks import ClassificationTask
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe, Task


def latency_stage(session: Session, *, retry: bool) -> LatencyTable:
    """Measure the latency table of the run, or put the given one there."""
    given = session.latency
    with session.folder.lock():
        traced = session.claim(latency=given, weights=False)
        options = Options(
            space=session.settings.space, moves=require_moves(session.settings.moves), latency=given,
            retry=retry,
        )  # fmt: skip
        return artefacts.make_latency_table(session.folder, traced, session.target, options, session.progress)


def cost_stage(session: Session, traced: TracedNetwork) -> MeasuringCost | None:
    """Estimate what measuring the latency table costs; None if there is one. Nothing is measured or written."""
    options = _inspected(session.settings)
    if _known_latency(session, traced, options) is not None:
        return None
    return measuring_cost(traced, session.target, space=options.space, moves=options.moves)


def prospects_stage(session: Session, traced: TracedNetwork) -> Prospects | None:
    """Return what can be gained on the target. Without the data, the time of the importances may not be known."""
    options, task = _inspected(session.settings), None
    if session.settings.data is not None:
        with contextlib.suppress(DataError):
            task = session.task
    latency = _known_latency(session, traced, options) or _measure_to_inspect(session, traced, options)
    return prospects(traced, latency, options, task)


def _inspected(settings: Settings) -> Options:
    return Options(
        space=settings.space, moves=require_moves(settings.moves), importance_method=settings.method,
        importance_recipe=_importance_recipe(settings), reinit=settings.reinit,
    )  # fmt: skip


def _known_latency(session: Session, traced: TracedNetwork, options: Options) -> LatencyTable | None:
    """Return the given latency table or that of the run."""
    if session.latency is not None:
        check_latency(session.latency, traced, session.target)
        return session.latency
    if session.settings.run is None:
        return None
    return artefacts.find_latency_table(RunFolder(Path(session.settings.run)), traced, session.target, options)


def _measure_to_inspect(session: Session, traced: TracedNetwork, options: Options) -> LatencyTable:
    """Measure a latency table. It is kept in the run if there is none yet: one for another target or space stays."""
    if session.settings.run is not None and RunFolder(Path(session.settings.run)).made_from(LATENCY) is None:
        with contextlib.suppress(HeaderMismatch):
            return latency_stage(session, retry=False)
    return measure_latency(traced, session.target, space=options.space, moves=options.moves, progress=session.progress)


def importance_stage(session: Session, *, retry: bool) -> ImportanceTable:
    """Measure the importance table of the run, or put the given one there."""
    settings, folder = session.settings, session.folder
    with folder.lock():
        if session.importance is not None:
            session.claim(session.importance)
            artefacts.keep_importance(folder, session.importance)
            return session.importance
        task = session.training_task()
        options = Options(
            space=settings.space, moves=require_moves(settings.moves), importance_method=settings.method,
            importance_recipe=_importance_recipe(settings), executor=make_executor(settings.executor),
            reinit=settings.reinit, allow_doubtful=settings.allow_doubtful, retry=retry,
        )  # fmt: skip
        Method.of(options.importance_method, options.importance_recipe, options.reinit)  # before the run keeps them
        checked = check_images(task, folder.path, session.progress, tested=False)
        traced, latency = session.claim(), folder.read(LATENCY, LatencyTable)
        artefacts.keep_checked_images(folder, checked)
        check = _latency_check(session, traced, latency, options)

        def before_training() -> None:
            check()
            score_original(session.model, task, session.progress)

        return artefacts.make_importance_table(
            folder, traced, task, options, session.progress, latency, before_training
        )


def _latency_check(
    session: Session, traced: TracedNetwork, latency: LatencyTable | None, options: Options
) -> Callable[[], None]:
    """Return the check before a training. Without a latency table there is nothing to check."""
    if latency is None:
        return lambda: None
    settings = session.settings
    budget = None if settings.budget is None else session.budget
    return LatencyCheck(
        traced, latency, options, budget, settings.target, run=session.folder.path, progress=session.progress
    )


def keep_importance(session: Session) -> None:
    """Put the given importance table into the run, once the command has succeeded with it."""
    if session.importance is not None:
        folder = RunFolder.at(session.settings.need("run"))
        with folder.lock():
            artefacts.keep_importance(folder, session.importance)


def frontier_stage(session: Session, importance: ImportanceTable | None = None) -> Frontier:
    """Solve with the two tables of the run. `importance` replaces the importance table."""
    settings, folder = session.settings, RunFolder.at(session.settings.need("run"))
    latency = folder.need(LATENCY, LatencyTable, _command("latency", settings))
    fit = _command("surrogate", settings)
    if importance is None:
        importance = folder.need(IMPORTANCE, ImportanceTable, _command("importance", settings))
    elif folder.read(IMPORTANCE, ImportanceTable) != importance:  # the surrogate is fitted to the table in the run
        table = shlex.quote(settings.need("importance"))
        fit = f"{_command('importance', settings)} --importance {table} && {fit}"
    network = folder.need(NETWORK, Network, _command("latency", settings))
    surrogate = artefacts.fitted_surrogate(folder, (latency, importance), fit) if settings.surrogate else None
    return solve(latency, importance, network=network, alpha=settings.alpha, surrogate=surrogate)


def surrogate_stage(session: Session) -> Surrogate:
    """Train whole plans of the run's tables, and fit the surrogate to their scores."""
    settings, folder = session.settings, session.folder
    latency = folder.need(LATENCY, LatencyTable, _command("latency", settings))
    importance = folder.need(IMPORTANCE, ImportanceTable, _command("importance", settings))
    options = Options(
        space=settings.space, moves=require_moves(settings.moves), executor=make_executor(settings.executor),
        allow_doubtful=settings.allow_doubtful,
    )  # fmt: skip
    task = session.training_task()
    with folder.lock():
        traced = session.claim(importance)
        if settings.budget is not None:
            _latency_check(session, traced, latency, options)()
        elif not options.allow_doubtful:
            check_trusted(latency, folder.path)
        return artefacts.make_surrogate(folder, traced, task, (latency, importance), options, session.progress)


def plan_stage(session: Session, frontier: Frontier) -> SolvedPlan:
    """Choose the plan that meets the budget when measured, and keep it in the run."""
    with session.folder.lock():
        traced = session.claim()
        here = get(session.target).environment(traced.example_tensors())
        measured_here = GIVEN not in (session.folder.made_from(LATENCY) or {})
        if measured_here and (differences := frontier.environment.differences(here)):
            raise RunError(
                f"The latency table in {session.settings.run} was measured in another environment "
                f"({'; '.join(differences)}). Use another run folder, or delete latency.json and latency.jsonl there "
                "and measure again."
            )
        return artefacts.choose_plan(session.folder, traced, frontier, session.budget, session.target, session.progress)


def finetune_stage(session: Session) -> Path:
    """Fine-tune the student of the chosen plan and return the folder of its metrics."""
    settings, task = session.settings, session.training_task()
    with session.folder.lock():
        plan, _ = _chosen_plan(settings)
        traced, place = session.claim(), _student_folder(settings, plan)
        student, teacher = rewrite(traced, plan), rewrite(traced, traced.vanilla) if settings.distil else None
        finetune(student, task, make_recipe(settings.recipe), teacher=teacher, run=place, progress=session.progress)
        return place / FINETUNING


def merge_stage(session: Session) -> Verification:
    """Merge, verify and save the fine-tuned student."""
    with session.folder.lock():
        plan, _ = _chosen_plan(session.settings)
        place = _student_folder(session.settings, plan)
        student = _trained_student(session.claim(), plan, place, session.settings)
        shallow = merge(student)
        verification = verify(student, shallow)
        artefacts.save_result(session.folder, shallow, plan, place)
        return verification


def export_stage(session: Session) -> tuple[Exported, ...]:
    """Export the result of the run to all files of the settings, with a model card beside each."""
    settings = session.settings
    if settings.int8:
        shipping.int8_names(settings.export)
    folder = session.folder
    with folder.lock():
        session.claim(weights=False)
        shallow, task = _load_result(session), _task_of_files(session)
        layout = _layout(settings)
        findings = artefacts.find_findings(folder)
        exported = shipping.export_files(shallow, folder.path, settings.export, task, layout)
        shipping.write_cards(shallow, exported, findings)
        if settings.int8 and task is not None:  # last: a file that loses too much is refused
            quantised = shipping.export_int8(shallow, folder.path, settings.export, task, layout, settings.target)
            if findings is not None:
                artefacts.keep_findings(folder, findings := shipping.with_int8(findings, quantised))
            shipping.write_cards(shallow, quantised, findings)
            exported += quantised
        return exported


def _layout(settings: Settings) -> Layout | None:
    return None if settings.raw_images is None else require_layout(settings.raw_images)


def _task_of_files(session: Session) -> Task | None:
    """Return the task whose preprocessing the files state. It is needed only for raw images and INT8."""
    settings = session.settings
    if settings.int8 or settings.raw_images is not None:
        return session.training_task()
    if settings.data is None:
        return None
    try:
        if isinstance(session.task, ClassificationTask):
            _ = session.task.preprocessing  # reads the data
        return session.task
    except DepthfoldError as error:
        warnings.warn(f"The files do not state mean, deviation and classes, because of the data: {error}", stacklevel=2)
        return None


def report_stage(session: Session, *, remeasure: bool = False) -> Path:
    """Write the report. Evaluate the result first, unless its findings are there and `remeasure` is False."""
    folder = RunFolder.at(session.settings.need("run"))
    with folder.lock():
        plan, budget = _chosen_plan(session.settings)
        student = _result_student(session.settings)  # refuses a result that is out of date
        findings = artefacts.find_findings(folder)
        if remeasure:
            folder.forget(PROFILES)
        if findings is None or remeasure:
            known = () if findings is None else findings.int8
            findings = replace(_evaluate(session, plan, budget, student), int8=known)
        return artefacts.keep_findings(folder, findings)


def _evaluate(session: Session, plan: SolvedPlan, budget: Budget, place: Path) -> Findings:
    settings, folder, task = session.settings, session.folder, session.training_task()
    traced, shallow = session.claim(), _load_result(session)
    student = _trained_student(traced, plan, place, settings)
    solution = Solution(
        latency=folder.need(LATENCY, LatencyTable, _command("latency", settings)),
        importance=folder.need(IMPORTANCE, ImportanceTable, _command("importance", settings)),
        frontier=frontier_stage(session), plan=plan, budget=budget,
    )  # fmt: skip
    networks = Networks(traced=traced, model=session.model, student=student, shallow=shallow)
    return evaluate(networks, solution, task, session.target, folder=folder.path, progress=session.progress)


def preflight(session: Session) -> TracedNetwork:
    """Check everything that can be checked before compress() and claim the run folder, which keeps the settings.

    The run can then be resumed with --run alone. A command that is refused here leaves nothing behind.
    """
    options, task = checked_options(_options(session)), session.training_task()
    with session.checking_channels():
        checked_inputs(session.model, task, session.target, options, session.inputs, None)
    checked = check_images(task, session.settings.run, session.progress)
    traced = session.claim(options.importance, options.latency)
    artefacts.keep_checked_images(session.folder, checked)
    return traced


def compress_stage(
    session: Session, traced: TracedNetwork, *, budget: str | None = None, retry: bool = False
) -> Compressed:
    """Run compress() on the network that preflight() has traced."""
    return compress(
        session.model, session.task, session.target, budget or session.budget, run=session.folder.path,
        example_inputs=session.inputs, traced=traced, options=_options(session, retry=retry),
        progress=session.progress,
    )  # fmt: skip


def _options(session: Session, *, retry: bool = False) -> Options:
    settings = session.settings
    return Options(
        space=settings.space, moves=require_moves(settings.moves), importance_method=settings.method,
        importance_recipe=_importance_recipe(settings), recipe=make_recipe(settings.recipe),
        latency=session.latency, importance=session.importance, executor=make_executor(settings.executor),
        reinit=settings.reinit, alpha=settings.alpha, surrogate=settings.surrogate,
        distil=settings.distil, exports=settings.export, raw_images=_layout(settings), int8=settings.int8,
        allow_doubtful=settings.allow_doubtful, retry=retry,
    )  # fmt: skip


def profile_stage(session: Session) -> str:
    """Measure the model or, if the run has a result, the original and the merged network side by side."""
    run = session.settings.run
    if run is None or not (Path(run) / RESULT).exists():
        return str(profile(session.model, session.inputs, session.target))
    return side_by_side(before_and_after(session.trace(), _load_result(session), session.target, session.progress))


def _importance_recipe(settings: Settings) -> Recipe | None:
    """Return the recipe of the importances, or None for the preset of the method."""
    given = settings.importance_recipe
    return None if given is None else make_recipe(given)


def _command(name: str, settings: Settings) -> str:
    """Return the command for this run, quoted for a shell."""
    return f"depthfold {name} --run {shlex.quote(os.path.normpath(settings.need('run')))}"


def _chosen_plan(settings: Settings) -> tuple[SolvedPlan, Budget]:
    folder = RunFolder.at(settings.need("run"))
    return artefacts.chosen_plan(folder, f"{_command('solve', settings)} --budget 60%")


def _student_folder(settings: Settings, plan: SolvedPlan) -> Path:
    """Return the folder in which the student of this plan is trained with the recipe of the settings."""
    folder = RunFolder.at(settings.need("run"))
    return artefacts.student_folder(folder, plan.plan, make_recipe(settings.recipe), distil=settings.distil)


def _trained_student(traced: TracedNetwork, plan: SolvedPlan, place: Path, settings: Settings) -> nn.Module:
    """Return the student of the plan with the fine-tuned weights in the folder."""
    try:
        return finetuned(rewrite(traced, plan), place)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Run: {_command('finetune', settings)}") from error


def _load_result(session: Session) -> nn.Module:
    """Return the merged network of the run."""
    _result_student(session.settings)
    return load(session.folder.path / RESULT, session.model, session.inputs)


def _result_student(settings: Settings) -> Path:
    """Return the folder of the student that the result was merged from.

    Raise RunError if there is no result, or if another plan was chosen or another student trained since.
    """
    folder, fix = RunFolder.at(settings.need("run")), f"Run: {_command('merge', settings)}"
    made_from, plan = folder.made_from(RESULT), folder.read(PLAN, SolvedPlan)
    if made_from is None:
        raise RunError(f"The run folder {folder.path} has no {RESULT} yet. {fix}")
    if plan is None:
        return folder.path / STUDENTS / made_from["student"]
    if made_from["plan"] != str(plan.plan):
        raise RunError(f"The result in {folder.path} is of another plan than the one that was chosen since. {fix}")
    newest = _student_folder(settings, plan)
    if newest.exists() and newest.name != made_from["student"]:
        raise RunError(
            f"The result in {folder.path} was not merged from the student that was fine-tuned last, {newest}. {fix}"
        )
    return folder.path / STUDENTS / made_from["student"]
