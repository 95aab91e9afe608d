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
from depthfold.pipeline.beginning import expect_data
from depthfold.pipeline.choice import Choice, chosen
from depthfold.pipeline.compression import Compressed, compress
from depthfold.pipeline.examination import again, before_and_after, findings_of
from depthfold.pipeline.executors import executor_of
from depthfold.pipeline.holdings import choice_of, how, merged_from, result_of, student_place, trained_student
from depthfold.pipeline.libraries import check_libraries
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.results import keep_result
from depthfold.pipeline.settings import Settings, given
from depthfold.pipeline.subject import Subject, given_importance
from depthfold.pipeline.tables import importance_of, latency_of
from depthfold.progress import Progress
from depthfold.reporting import Findings, report
from depthfold.rewriting import rewrite
from depthfold.solver import solve
from depthfold.store import RunFolder
from depthfold.store.run_folder import FINDINGS, IMPORTANCE, LATENCY, NETWORK, REPORT
from depthfold.tracing import TracedNetwork


def latency_stage(subject: Subject, *, retry: bool) -> LatencyTable:
    with subject.folder.lock():
        network, space = subject.traced(), subject.settings.space
        return latency_of(subject.folder, network, subject.target, space, subject.progress, retry=retry)


def importance_stage(subject: Subject, *, retry: bool) -> ImportanceTable:
    settings, folder = subject.settings, subject.folder
    with folder.lock():
        if (table := given_importance(settings)) is not None:
            subject.weighed(table)
            folder.write(IMPORTANCE, table)
            return table
        task, recipe, executor = subject.needed_task(), recipe_of(settings.trainings), executor_of(settings.executor)
        network = subject.weighed()
        return importance_of(
            folder, network, task, recipe, settings.space, settings.afresh, executor, retry, subject.progress
        )


def frontier_stage(settings: Settings) -> Frontier:
    """Every plan, from the two tables in the run, or from the importance table that is given. keep_given() puts that
    one into the run, when all has gone well with it."""
    return _frontier(settings, given_importance(settings))


def keep_given(settings: Settings) -> None:
    """An importance table that is given takes the place of the run's own."""
    if (importance := given_importance(settings)) is not None:
        folder = RunFolder.at(settings.folder)
        with folder.lock():
            folder.write(IMPORTANCE, importance)


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
        return chosen(subject.folder, network, frontier, budget, subject.target, subject.progress)


def finetune_stage(subject: Subject) -> Path:
    """The student of the chosen plan, trained; the folder of its training."""
    settings, task = subject.settings, subject.needed_task()
    with subject.folder.lock():
        plan = choice_of(settings).plan
        student, place = rewrite(subject.weighed(), plan), student_place(settings, plan)
        teacher, recipe = subject.model if settings.distil else None, recipe_of(settings.recipe)
        finetune(student, task, recipe, teacher=teacher, run=place, progress=subject.progress)
        return place


def merge_stage(subject: Subject) -> Verification:
    """The fine-tuned student merged, verified and saved."""
    settings = subject.settings
    with subject.folder.lock():
        plan = choice_of(settings).plan
        place = student_place(settings, plan)
        student = trained_student(subject.weighed(), plan, place, settings)
        shallow = merge(student)
        verification = verify(student, shallow)
        keep_result(subject.folder, shallow, place)
        return verification


def export_stage(subject: Subject) -> tuple[Exported, ...]:
    with subject.folder.lock():
        subject.traced()
        shallow = result_of(subject)
        return tuple(export(shallow, subject.folder.path / name) for name in subject.settings.export)


def report_stage(settings: Settings, *, afresh: bool = False, progress: Progress | None = None) -> Path:
    """The page. What it tells is measured first, unless that was done of this result and nothing else is asked for."""
    folder = RunFolder.at(settings.folder)
    with folder.lock():
        choice, findings = choice_of(settings), folder.read(FINDINGS, Findings)
        merged_from(settings)  # refuses a result that is out of date, of which no page should be made, either
        if afresh or findings is None or findings.plan != choice.plan:
            findings = _examine(Subject.of(settings, progress), choice)
            folder.write(FINDINGS, findings)
        return report(findings, folder.path / REPORT)


def _examine(subject: Subject, choice: Choice) -> Findings:
    settings, folder, task = subject.settings, subject.folder, subject.needed_task()
    network = subject.weighed()
    shallow = result_of(subject)
    student = trained_student(network, choice.plan, merged_from(settings), settings)
    return findings_of(
        network, subject.model, student, shallow, task, subject.target, Budget.parse(choice.budget),
        latency=folder.need(LATENCY, LatencyTable, how("latency", settings)),
        importance=folder.need(IMPORTANCE, ImportanceTable, how("importance", settings)),
        frontier=_frontier(settings),
        plan=choice.plan,
        command=again(folder.path),
        progress=subject.progress,
    )  # fmt: skip


def begin(subject: Subject) -> TracedNetwork:
    """Check all that can be checked before hours are spent; then the run keeps what it was told, so that it can go on
    with --run alone if it is interrupted. What is refused here leaves nothing behind."""
    settings, importance = subject.settings, given_importance(subject.settings)
    check_libraries(settings.export, executor_of(settings.executor) if importance is None else None)
    expect_data(subject.needed_task(), subject.model, subject.inputs, importances=importance is None)
    return subject.traced(importance)


def compress_stage(subject: Subject, network: TracedNetwork, *, retry: bool) -> Compressed:
    """All of it, of the network that begin() has traced."""
    settings = subject.settings
    return compress(
        subject.model,
        subject.task,
        subject.target,
        given(settings.budget, "budget"),
        run=subject.folder.path,
        example_inputs=subject.inputs,
        network=network,
        space=settings.space,
        trainings=recipe_of(settings.trainings),
        recipe=recipe_of(settings.recipe),
        importance=given_importance(settings),
        executor=executor_of(settings.executor),
        afresh=settings.afresh,
        retry=retry,
        alpha=settings.alpha,
        distil=settings.distil,
        exports=settings.export,
        progress=subject.progress,
    )


def profile_stage(subject: Subject) -> dict[str, Profile]:
    """Before and after of a run."""
    network: TracedNetwork = subject.seen()
    return before_and_after(network, result_of(subject), subject.target)
