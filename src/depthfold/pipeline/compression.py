"""compress(): turn a CNN into a faster one, stage by stage, in a run folder."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from depthfold.backends import Backend
from depthfold.core import Budget, SolvedPlan
from depthfold.exporting import Exported
from depthfold.finetuning import finetune
from depthfold.merging import merge
from depthfold.pipeline import artefacts, shipping
from depthfold.pipeline.evaluation import Networks, Solution, evaluate, score_original
from depthfold.pipeline.feasibility import LatencyCheck
from depthfold.pipeline.options import Options
from depthfold.pipeline.preflight import (
    check_drops,
    check_export_inputs,
    check_images,
    check_latency,
    checked_inputs,
    checked_options,
)
from depthfold.progress import Progress
from depthfold.reporting import Findings
from depthfold.rewriting import rewrite
from depthfold.solver import solve
from depthfold.store import RunFolder
from depthfold.tracing import TracedNetwork, trace
from depthfold.training import Task

_DEFAULTS = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The fast network, the plan that made it, everything that was found out about it, and the exported files."""

    shallow: nn.Module
    plan: SolvedPlan
    findings: Findings
    folder: Path
    exported: tuple[Exported, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the findings in full would fill pages."""
        found, parts = self.findings, []
        if found.before and found.after:
            before, after = found.before.latency, found.after.latency
            parts.append(f"latency {before:.4g} ms -> {after:.4g} ms ({found.speedup})")
        if (one := found.score_before) and (two := found.score_after):
            form = ".2%" if one.share else ".4g"
            parts.append(f"{one.metric} {one.score:{form}} -> {two.score:{form}}")
        parts.append(f"{found.network.depth} traced convolutions -> {self.plan.convolutions}")
        return f"Compressed({', '.join(parts)}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        int8 = tuple(f"{each.path.name}: {each.int8}" for each in self.exported if each.int8)
        compared = self.findings.comparison()
        return replace(compared, notes=(*compared.notes, *int8, f"folder: {self.folder}")).html()


def compress(
    model: nn.Module,
    task: Task,
    target: str | Backend,
    budget: Budget | str,
    *,
    run: str | Path,
    example_inputs: Any = None,
    traced: TracedNetwork | None = None,
    options: Options = _DEFAULTS,
    progress: Progress | None = None,
) -> Compressed:
    """Compress the model so that it meets the budget on the target, and fine-tune it.

    All artefacts are kept in the folder `run`. If it is interrupted and run again, it resumes there and gives the same
    result. `traced` is the result of trace(), if the model was already traced. `example_inputs` are those of trace();
    without them and without `traced`, an image of the task is used.
    """
    budget, options = Budget.parse(budget), checked_options(options)
    inputs = checked_inputs(model, task, target, options, example_inputs, traced)
    checked = check_images(task, run, progress)
    traced = traced or trace(model, inputs, ignore=options.ignore, at=options.at)
    check_export_inputs(traced, options.exports)
    if options.latency is not None:
        check_latency(options.latency, traced, target)
    if options.importance is not None:
        check_drops(options.importance, traced.network, options.space, options.moves)
    folder = RunFolder.open(run)  # not earlier: a call that is refused leaves nothing behind
    with folder.lock():
        folder.claim(traced.network)
        folder.claim_weights(traced.weights_digest)
        artefacts.keep_checked_images(folder, checked)

        latency = artefacts.make_latency_table(folder, traced, target, options, progress)
        check = LatencyCheck(traced, latency, options, budget, target, run=folder.path, progress=progress)

        @functools.cache
        def before_training() -> None:
            check()
            score_original(model, task, progress)

        importance = options.importance
        if importance is not None:
            before_training()
        else:
            importance = artefacts.make_importance_table(
                folder, traced, task, options, progress, latency, before_training
            )
        surrogate = None
        if options.surrogate:
            before_training()
            surrogate = artefacts.make_surrogate(folder, traced, task, (latency, importance), options, progress)
        frontier = solve(latency, importance, network=traced.network, alpha=options.alpha, surrogate=surrogate)
        plan = artefacts.choose_plan(folder, traced, frontier, budget, target, progress)
        if options.importance is not None:  # not before it has led to a plan: it replaces a table that took hours
            artefacts.keep_importance(folder, options.importance)

        place = artefacts.student_folder(folder, plan.plan, options.recipe, distil=options.distil)
        # The teacher is the traced graph, which can be computed with fused kernels on a GPU.
        teacher = rewrite(traced, traced.vanilla) if options.distil else None
        student = finetune(rewrite(traced, plan), task, options.recipe, teacher=teacher, run=place, progress=progress)
        shallow = merge(student)
        names = (*options.exports, *(shipping.int8_names(options.exports) if options.int8 else ()))
        artefacts.save_result(folder, shallow, plan, place, names)
        exported = shipping.export_files(shallow, folder.path, options.exports, task, options.raw_images)

        networks = Networks(traced=traced, model=model, student=student, shallow=shallow)
        solution = Solution(latency=latency, importance=importance, frontier=frontier, plan=plan, budget=budget)
        findings = evaluate(networks, solution, task, target, folder=folder.path, progress=progress)
        artefacts.keep_findings(folder, findings)
        shipping.write_cards(shallow, exported, findings)
        if options.int8:  # last: a file that loses too much is refused, and everything else is done by then
            quantised = shipping.export_int8(shallow, folder.path, options.exports, task, options.raw_images, target)
            findings = shipping.with_int8(findings, quantised)
            artefacts.keep_findings(folder, findings)
            shipping.write_cards(shallow, quantised, findings)
            exported += quantised
    return Compressed(shallow=shallow, plan=plan, findings=findings, folder=folder.path, exported=exported)
