"""The pipeline stage by stage, each over the run folder: what compress() does in one go, one command at a time."""

from __future__ import annotations

from pathlib import Path

from depthfold.backends import get
from depthfold.core import Budget, Frontier, ImportanceTable, LatencyTable, Network, Profile, SolvedPlan
from depthfold.errors import RunError
from depthfold.exporting import export
from depthfold.exporting.exported import Exported
from depthfold.finetuning import finetune
from depthfold.latency.candidates import network_inputs
from depthfold.merging import Verification, merge, verify
from depthfold.pipeline.artefacts import (
    choose_plan,
    findings_inputs,
    keep_importance,
    make_importance_table,
    make_latency_table,
    save_result,
)
from depthfold.pipeline.compression import Compressed, compress
from depthfold.pipeline.evaluation import Networks, Solution, before_and_after, evaluate
from depthfold.pipeline.executors import executor_of
from depthfold.pipeline.holdings import choice_of, how, merged_from, result_of, student_place, trained_student
from depthfold.pipeline.options import Options
from depthfold.pipeline.preflight import check_libraries, expect_data
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.settings import Settings, given
from depthfold.pipeline.subject import Subject, given_importance
from depthfold.progress import Progress
from depthfold.reporting import Findings, report
from depthfold.rewriting import rewrite
from depthfold.solver import solve
from depthfold.store import RunFolder
from depthfold.store.run_folder import FINDINGS, IMPORTANCE, LATENCY, NETWORK, REPORT
from depthfold.tracing import TracedNetwork


def latency_stage(subject: Subject, *, retry: bool) -> LatencyTable:
    with subject.folder.lock():
        options = Options(space=subject.settings.space, retry=retry)
        return make_latency_table(subject.folder, subject.traced(), subject.target, options, subject.progress)


def importance_stage(subject: Subject, *, retry: bool) -> ImportanceTable:
    settings, folder = subject.settings, subject.folder
    with folder.lock():
        if (table := given_importance(settings)) is not None:
            subject.weighed(table)
            keep_importance(folder, table)
            return table
        task, options = subject.needed_task(), options_of(settings, retry=retry)
        return make_importance_table(folder, subject.weighed(), task, options, subject.progress)


def frontier_stage(settings: Settings) -> Frontier:
    """Every plan, from the two tables in the run, or from the importance table that is given. keep_given() puts that
    one into the run, when all has gone well with it."""
    return _frontier(settings, given_importance(settings))


def keep_given(settings: Settings) -> None:
    """An importance table that is given takes the place of the run's own."""
    if (importance := given_importance(settings)) is not None:
        folder = RunFolder.at(settings.folder)
        with folder.lock():
            keep_importance(folder, importance)


def _frontier(settings: Settings, importance: ImportanceTable | None = None) -> Frontier:
    folder = RunFolder.at(settings.folder)
    latency = folder.need(LATENCY, LatencyTable, how("latency", settings))
    if importance is None:
        importance = folder.need(IMPORTANCE, ImportanceTable, how("importance", settings))
    network = folder.need(NETWORK, Network, how("latency", settings))
    return solve(latency, importance, network=network, alpha=settings.alpha)


def plan_stage(subject: Subject, frontier: Frontier) -> SolvedPlan:
    """The plan that meets the budget by the stopwatch, kept in the run."""
    settings = subject.settings
    with subject.folder.lock():
        network = subject.weighed()
        here = get(subject.target).environment(network_inputs(network))
        if frontier.environment != here:
            raise RunError(
                f"The latency table of the run {settings.run} was measured in another environment "
                f"({frontier.environment}; now {here}). Run: {how('latency', settings)}"
            )
        budget = Budget.parse(given(settings.budget, "budget"))
        return choose_plan(subject.folder, network, frontier, budget, subject.target, subject.progress)


def finetune_stage(subject: Subject) -> Path:
    """The student of the chosen plan, trained; the folder of its training."""
    settings, task = subject.settings, subject.needed_task()
    with subject.folder.lock():
        plan, _ = choice_of(settings)
        student, place = rewrite(subject.weighed(), plan), student_place(settings, plan)
        teacher, recipe = subject.model if settings.distil else None, recipe_of(settings.recipe)
        finetune(student, task, recipe, teacher=teacher, run=place, progress=subject.progress)
        return place


def merge_stage(subject: Subject) -> Verification:
    """The fine-tuned student merged, verified and saved."""
    settings = subject.settings
    with subject.folder.lock():
        plan, _ = choice_of(settings)
        place = student_place(settings, plan)
        student = trained_student(subject.weighed(), plan, place, settings)
        shallow = merge(student)
        verification = verify(student, shallow)
        save_result(subject.folder, shallow, plan, place)
        return verification


def export_stage(subject: Subject) -> tuple[Exported, ...]:
    with subject.folder.lock():
        subject.traced()
        shallow = result_of(subject)
        return tuple(export(shallow, subject.folder.path / name) for name in subject.settings.export)


def report_stage(settings: Settings, *, again: bool = False, progress: Progress | None = None) -> Path:
    """The page. What it tells is measured first, unless that was done of this result and nothing else is asked for."""
    folder = RunFolder.at(settings.folder)
    with folder.lock():
        choice_of(settings)
        merged_from(settings)  # refuses a result that is out of date
        made_from = findings_inputs(folder)
        findings = None if again else folder.find(FINDINGS, Findings, made_from)
        if findings is None:
            findings = _evaluate(Subject.of(settings, progress))
            folder.write(FINDINGS, findings, made_from)
        return report(findings, folder.path / REPORT)


def _evaluate(subject: Subject) -> Findings:
    settings, folder, task = subject.settings, subject.folder, subject.needed_task()
    traced = subject.weighed()
    shallow, (plan, budget) = result_of(subject), choice_of(settings)
    student = trained_student(traced, plan, merged_from(settings), settings)
    solution = Solution(
        latency=folder.need(LATENCY, LatencyTable, how("latency", settings)),
        importance=folder.need(IMPORTANCE, ImportanceTable, how("importance", settings)),
        frontier=_frontier(settings),
        plan=plan,
        budget=budget,
    )
    networks = Networks(traced=traced, model=subject.model, student=student, shallow=shallow)
    return evaluate(networks, solution, task, subject.target, folder=folder.path, progress=subject.progress)


def begin(subject: Subject) -> TracedNetwork:
    """Check all that can be checked before hours are spent; then the run keeps what it was told, so that it can go on
    with --run alone if it is interrupted. What is refused here leaves nothing behind."""
    settings, importance = subject.settings, given_importance(subject.settings)
    check_libraries(settings.export, executor_of(settings.executor) if importance is None else None)
    expect_data(subject.needed_task(), subject.model, subject.inputs, importances=importance is None)
    return subject.traced(importance)


def compress_stage(subject: Subject, network: TracedNetwork, *, retry: bool) -> Compressed:
    """Run compress() on the network that begin() has traced."""
    settings = subject.settings
    return compress(
        subject.model,
        subject.task,
        subject.target,
        given(settings.budget, "budget"),
        run=subject.folder.path,
        example_inputs=subject.inputs,
        traced=network,
        options=options_of(settings, retry=retry),
        progress=subject.progress,
    )


def options_of(settings: Settings, *, retry: bool) -> Options:
    """Return the options of compress() that the settings name."""
    return Options(
        space=settings.space,
        importance_recipe=recipe_of(settings.trainings),
        recipe=recipe_of(settings.recipe),
        importance=given_importance(settings),
        executor=executor_of(settings.executor),
        reinit=settings.afresh,
        retry=retry,
        alpha=settings.alpha,
        distil=settings.distil,
        exports=settings.export,
    )


def profile_stage(subject: Subject) -> dict[str, Profile]:
    """Before and after of a run."""
    network: TracedNetwork = subject.seen()
    return before_and_after(network, result_of(subject), subject.target)
