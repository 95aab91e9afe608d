"""The pipeline stage by stage, each over the run folder: what compress() does in one go, one command at a time."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from depthfold.backends import get
from depthfold.core import Budget, Frontier, ImportanceTable, LatencyTable, Network, Profile, SolvedPlan
from depthfold.errors import RunError
from depthfold.exporting import export, load, save
from depthfold.exporting.exported import Exported
from depthfold.finetuning import finetune, finetuned
from depthfold.latency.candidates import network_inputs
from depthfold.merging import Verification, merge, verify
from depthfold.pipeline.choice import Choice, chosen
from depthfold.pipeline.compress import Compressed, compress
from depthfold.pipeline.examination import before_and_after, findings_of
from depthfold.pipeline.executors import executor_of
from depthfold.pipeline.recipes import recipe_of
from depthfold.pipeline.settings import Settings, given
from depthfold.pipeline.subject import Subject, given_importance
from depthfold.pipeline.tables import importance_of, latency_of
from depthfold.reporting import Findings, report
from depthfold.rewriting import rewrite
from depthfold.solver import solve
from depthfold.store import RunFolder
from depthfold.store.run_folder import CHOICE, FINDINGS, IMPORTANCE, LATENCY, NETWORK, REPORT, RESULT
from depthfold.tracing import TracedNetwork


def latency_stage(subject: Subject) -> LatencyTable:
    network = subject.traced()
    return latency_of(subject.folder, network, subject.target, subject.settings.space, subject.progress)


def importance_stage(subject: Subject, *, retry: bool) -> ImportanceTable:
    settings, network = subject.settings, subject.traced()
    if (table := given_importance(settings)) is not None:
        subject.folder.write(IMPORTANCE, table)
        return table
    recipe, executor = recipe_of(settings.trainings), executor_of(settings.executor)
    return importance_of(
        subject.folder, network, subject.needed_task(), recipe, settings.space, executor, retry, subject.progress
    )


def frontier_stage(settings: Settings) -> Frontier:
    """Every plan, from the two tables in the run."""
    folder = RunFolder.open(settings.folder)
    latency = folder.need(LATENCY, LatencyTable, f"depthfold latency --run {settings.run}")
    if (importance := given_importance(settings)) is not None:
        folder.write(IMPORTANCE, importance)
    importance = folder.need(IMPORTANCE, ImportanceTable, f"depthfold importance --run {settings.run}")
    network = folder.need(NETWORK, Network, f"depthfold latency --run {settings.run}")
    return solve(latency, importance, network=network, alpha=settings.alpha)


def plan_stage(subject: Subject, frontier: Frontier) -> SolvedPlan:
    """The plan that meets the budget by the stopwatch, kept in the run."""
    settings, network = subject.settings, subject.traced()
    here = get(subject.target).environment(network_inputs(network))
    if frontier.environment != here:
        raise RunError(
            f"The latency table of the run {settings.run} was measured in another environment ({frontier.environment}; "
            f"now {here}). Run: depthfold latency --run {settings.run}"
        )
    budget = Budget.parse(given(settings.budget, "budget"))
    return chosen(subject.folder, network, frontier, budget, subject.target, subject.progress)


def finetune_stage(subject: Subject) -> nn.Module:
    settings, task = subject.settings, subject.needed_task()
    student = rewrite(subject.traced(), _choice(settings).plan)
    teacher = subject.model if settings.distil else None
    recipe, run = recipe_of(settings.recipe), subject.folder.path
    return finetune(student, task, recipe, teacher=teacher, run=run, progress=subject.progress)


def merge_stage(subject: Subject) -> Verification:
    """The fine-tuned student merged, verified and saved."""
    student = finetuned(rewrite(subject.traced(), _choice(subject.settings).plan), subject.folder.path)
    shallow = merge(student)
    verification = verify(student, shallow)
    save(shallow, subject.folder.path / RESULT)
    (subject.folder.path / FINDINGS).unlink(missing_ok=True)  # of a result that is no longer there
    return verification


def export_stage(subject: Subject) -> tuple[Exported, ...]:
    subject.traced()
    shallow = result_of(subject)
    return tuple(export(shallow, subject.folder.path / name) for name in subject.settings.export)


def report_stage(settings: Settings) -> Path:
    """The page; what it tells is measured first, unless that was done after the network was merged."""
    folder = RunFolder.open(settings.folder)
    choice, findings = _choice(settings), folder.read(FINDINGS, Findings)
    if findings is None or findings.plan != choice.plan:
        findings = _examine(Subject.of(settings), choice)
        folder.write(FINDINGS, findings)
    return report(findings, folder.path / REPORT)


def _examine(subject: Subject, choice: Choice) -> Findings:
    settings, folder, task = subject.settings, subject.folder, subject.needed_task()
    network = subject.traced()
    shallow = result_of(subject)
    student = finetuned(rewrite(network, choice.plan), folder.path)
    return findings_of(
        network, subject.model, student, shallow, task, subject.target, Budget.parse(choice.budget),
        latency=folder.need(LATENCY, LatencyTable, f"depthfold latency --run {settings.run}"),
        importance=folder.need(IMPORTANCE, ImportanceTable, f"depthfold importance --run {settings.run}"),
        frontier=frontier_stage(settings),
        plan=choice.plan,
    )  # fmt: skip


def compress_stage(subject: Subject, *, retry: bool) -> Compressed:
    settings = subject.settings
    return compress(
        subject.model,
        subject.needed_task(),
        subject.target,
        given(settings.budget, "budget"),
        run=subject.folder.path,
        example_inputs=subject.inputs,
        ignore=settings.ignore,
        at=settings.at,
        space=settings.space,
        trainings=recipe_of(settings.trainings),
        recipe=recipe_of(settings.recipe),
        importance=given_importance(settings),
        executor=executor_of(settings.executor),
        retry=retry,
        alpha=settings.alpha,
        distil=settings.distil,
        exports=settings.export,
        progress=subject.progress,
    )


def profile_stage(subject: Subject) -> dict[str, Profile]:
    """Before and after of a run."""
    network: TracedNetwork = subject.traced()
    return before_and_after(network, result_of(subject), subject.target)


def has_result(settings: Settings) -> bool:
    return settings.run is not None and (Path(settings.run) / RESULT).exists()


def result_of(subject: Subject) -> nn.Module:
    """The merged network of the run."""
    if not has_result(subject.settings):
        run = subject.settings.run
        raise RunError(f"The run folder {run} has no {RESULT} yet. Run: depthfold merge --run {run}")
    return load(subject.folder.path / RESULT, subject.model, subject.inputs)


def _choice(settings: Settings) -> Choice:
    command = f"depthfold solve --run {settings.run} --budget 60%"
    return RunFolder.open(settings.folder).need(CHOICE, Choice, command)
