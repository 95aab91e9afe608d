"""The commands that do one stage each, a few lines over a stage of the pipeline.

A command's parameters are read through its context, all together, so that the file and the run can fill in the rest.
Everything that imports torch is imported inside the commands: --help does not wait for it.
"""

from __future__ import annotations

import typer

from depthfold.cli import options as o
from depthfold.cli.printing import say, watched
from depthfold.cli.root import app
from depthfold.cli.telling import settings_of, told


@app.command(epilog="Example: depthfold inspect torchvision:mobilenet_v2 --input 3x224x224")
def inspect(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    json: o.Json = False, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Show what can be merged, and why the rest cannot."""
    with settings_of(ctx, "model", looks=True) as settings:
        from depthfold.pipeline.subject import Subject

        network = Subject.of(settings).seen()
        say(network.dumps() if json else network)


@app.command(epilog="Example: depthfold latency file.py:model --input 3x32x32 --target onnxruntime:threads=2 --run out")
def latency(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    space: o.Space = None, target: o.Target = None, retry: o.Retry = False, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Measure how long every block takes on the target (T of the paper). Writes latency.json."""
    with settings_of(ctx, "run", "model", "target") as settings:
        from depthfold.pipeline.stages import latency_stage
        from depthfold.pipeline.subject import Subject

        say(latency_stage(Subject.of(settings, watched()), retry=retry))


@app.command(epilog="Example: depthfold importance --run out --data cifar10:data --executor processes:2")
def importance(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    space: o.Space = None, trainings: o.Trainings = None, executor: o.Executor = None, importance: o.Importance = None,
    afresh: o.Afresh = None, retry: o.Retry = False, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Measure what every block is worth, by one short training each (I of the paper). Writes importance.json."""
    with settings_of(ctx, "run", "model") as settings:
        from depthfold.pipeline.stages import importance_stage
        from depthfold.pipeline.subject import Subject

        say(importance_stage(Subject.of(settings, watched()), retry=retry))


@app.command(epilog="Example: depthfold solve --run out --budget 60%")
def solve(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    target: o.Target = None, budget: o.Budget = None, importance: o.Importance = None, alpha: o.Alpha = None,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Show every optimal plan; with a budget, choose the one that meets it by the stopwatch. Writes choice.json."""
    with settings_of(ctx, "run") as settings:
        from depthfold.pipeline.stages import frontier_stage, keep_given, plan_stage
        from depthfold.pipeline.subject import Subject

        frontier = frontier_stage(settings)
        say(frontier)
        if settings.budget is not None:
            plan = plan_stage(Subject.of(settings, watched()), frontier)
            say(f"\nChosen for the budget of {settings.budget}, timed end to end:\n{plan}")
        keep_given(settings)


@app.command(epilog="Example: depthfold finetune --run out --recipe quick")
def finetune(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    recipe: o.Recipe = None, distil: o.Distil = None, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Train the network of the chosen plan until it has recovered. Keeps checkpoints in students/."""
    with settings_of(ctx, "run", "model", "data") as settings:
        from depthfold.pipeline.stages import finetune_stage
        from depthfold.pipeline.subject import Subject

        place = finetune_stage(Subject.of(settings, watched()))
        say(f"Fine-tuned; its metrics are in {place}.")


@app.command(epilog="Example: depthfold merge --run out")
def merge(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Merge the fine-tuned network, verify that it computes the same, and save it. Writes result/."""
    with settings_of(ctx, "run", "model") as settings:
        from depthfold.pipeline.stages import merge_stage
        from depthfold.pipeline.subject import Subject

        say(merge_stage(Subject.of(settings, watched())))


@app.command(epilog="Example: depthfold export --run out --export model.onnx --export model.pt2")
def export(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    export: o.Export = None, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Write the merged network to files that run without depthfold, each compared with PyTorch."""
    with settings_of(ctx, "run", "model") as settings:
        from depthfold.pipeline.stages import export_stage
        from depthfold.pipeline.subject import Subject

        for exported in export_stage(Subject.of(settings, watched())):
            say(exported)


@app.command(epilog="Example: depthfold report --run out")
def report(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    target: o.Target = None, alpha: o.Alpha = None, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Examine both networks side by side, unless that was done as it is asked for now, and write report.html."""
    with settings_of(ctx, "run", looks=True) as settings:
        from depthfold.pipeline.stages import report_stage

        again = config is not None or set(told(ctx)) != {"run"}
        say(report_stage(settings, again=again, progress=watched()))
