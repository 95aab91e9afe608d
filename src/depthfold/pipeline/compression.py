"""compress(): from a CNN to a faster one, stage by stage, each of which resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from depthfold.backends import Backend
from depthfold.core import Budget, ImportanceTable, SolvedPlan
from depthfold.core.space import Space
from depthfold.exporting import export
from depthfold.finetuning import finetune
from depthfold.importance.ledger import digest
from depthfold.jobs import Executor
from depthfold.merging import merge
from depthfold.pipeline.beginning import expect_arguments, expect_data, expect_network, recipe_given
from depthfold.pipeline.choice import chosen
from depthfold.pipeline.examination import again, findings_of, inputs_of
from depthfold.pipeline.libraries import check_libraries
from depthfold.pipeline.results import keep_result, student_folder
from depthfold.pipeline.tables import importance_of, latency_of
from depthfold.progress import Progress
from depthfold.reporting import Findings, report
from depthfold.rewriting import rewrite
from depthfold.solver import solve
from depthfold.store.run_folder import FINDINGS, IMPORTANCE, REPORT, RunFolder
from depthfold.tracing import TracedNetwork, trace
from depthfold.training.recipe import Recipe
from depthfold.training.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The fast network, the plan that made it, and everything that was found on the way."""

    shallow: nn.Module
    plan: SolvedPlan
    findings: Findings
    folder: Path

    def __repr__(self) -> str:
        """A line: the findings alone, in full, would fill pages."""
        found, parts = self.findings, []
        if found.before and found.after:
            before, after = found.before.latency, found.after.latency
            parts.append(f"latency {before:.4g} ms -> {after:.4g} ms ({before / after:.2f}x as fast)")
        if (one := found.score_before) and (two := found.score_after):
            form = ".2%" if one.share else ".4g"
            parts.append(f"{one.metric} {one.score:{form}} -> {two.score:{form}}")
        parts.append(f"{found.network.depth} traced convolutions -> {len(self.plan.segments)}")
        return f"Compressed({', '.join(parts)}, folder={str(self.folder)!r})"


def compress(
    model: nn.Module,
    task: Task,
    target: str | Backend,
    budget: Budget | str | float,
    *,
    run: str | Path,
    example_inputs: Any = None,
    ignore: Sequence[str | type[nn.Module]] = (),
    at: str | None = None,
    network: TracedNetwork | None = None,
    space: Space = "paper",
    trainings: Recipe | str = "importance",
    recipe: Recipe | str = "quick",
    importance: ImportanceTable | None = None,
    executor: Executor | None = None,
    afresh: bool = True,
    retry: bool = False,
    alpha: float | None = None,
    distil: bool = True,
    exports: Sequence[str] = ("model.onnx",),
    progress: Progress | None = None,
) -> Compressed:
    """The model, folded so that it meets the budget on the target, and fine-tuned.

    Everything goes into the folder `run`; interrupted at any moment and run again, it goes on there, to the same
    result. `network` is the model as it was traced already, if it was. `trainings` is the recipe of the importances,
    unless a table is given; whether blocks of one layer begin `afresh` in them measure_importance() explains. `retry`
    repeats what failed for either table: blocks that the runtime rejected (out of memory, say), and trainings.
    `recipe` is that of fine-tuning, for which the model is the teacher if `distil`.
    `alpha` normalises the importances as the solver says. `exports` are files to write beside the result; their
    suffixes say in which form. The other arguments are those of the verbs.
    """
    trainings, recipe = recipe_given("trainings", trainings), recipe_given("recipe", recipe)
    expect_arguments(task, target, space, importance, executor, alpha, exports)
    check_libraries(exports, executor if importance is None else None)
    if network is not None:
        expect_network(network, model, ignore, at)
    budget, inputs = Budget.parse(budget), inputs_of(task, example_inputs)
    expect_data(task, model, inputs, importances=importance is None)
    network = network or trace(model, inputs, ignore=ignore, at=at)
    folder = RunFolder.open(run)  # not before: what is refused leaves nothing behind
    with folder.lock():
        folder.claim(network)
        folder.claim_weights(digest(network))

        latency = latency_of(folder, network, target, space, progress, retry=retry)
        given = importance
        if importance is None:
            importance = importance_of(folder, network, task, trainings, space, afresh, executor, retry, progress)

        frontier = solve(latency, importance, network=network, alpha=alpha)
        plan = chosen(folder, network, frontier, budget, target, progress)
        if given is not None:  # not before it has led to a plan: the table that the run has may be one of many hours
            folder.write(IMPORTANCE, given)

        student, place = rewrite(network, plan), student_folder(folder, plan, recipe, distil=distil)
        student = finetune(student, task, recipe, teacher=model if distil else None, run=place, progress=progress)
        shallow = merge(student)
        keep_result(folder, shallow, place)
        for name in exports:
            export(shallow, folder.path / name)

        findings = findings_of(
            network, model, student, shallow, task, target, budget, latency=latency, importance=importance,
            frontier=frontier, plan=plan, command=again(folder.path), progress=progress,
        )  # fmt: skip
        folder.write(FINDINGS, findings)
        report(findings, folder.path / REPORT)
    return Compressed(shallow=shallow, plan=plan, findings=findings, folder=folder.path)
