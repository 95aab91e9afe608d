"""The commands that go all the way, and the one that measures a network as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthfold.cli import options as o
from depthfold.cli.printing import say, summary, watched
from depthfold.cli.root import app
from depthfold.cli.telling import settings_of

if TYPE_CHECKING:
    from depthfold.pipeline import Compressed
    from depthfold.pipeline.settings import Settings


@app.command(
    epilog="Example: depthfold compress file.py:model --data file.py:data --target onnxruntime --budget 60% --run out"
)
def compress(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    space: o.Space = None, target: o.Target = None, budget: o.Budget = None, trainings: o.Trainings = None,
    importance: o.Importance = None, executor: o.Executor = None, afresh: o.Afresh = None, retry: o.Retry = False,
    alpha: o.Alpha = None, recipe: o.Recipe = None, distil: o.Distil = None, export: o.Export = None,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """All of it: from a CNN to a faster one, with a report. Interrupted and run again, it goes on."""
    with settings_of(ctx, "run", "model", "data", "target", "budget") as settings:
        from depthfold.pipeline.stages import begin, compress_stage
        from depthfold.pipeline.subject import Subject

        subject = Subject.of(settings, watched())
        _summary(compress_stage(subject, begin(subject), retry=retry), settings)


@app.command(epilog="Example: depthfold demo --run demo")
def demo(
    run: Annotated[str, typer.Option(help="The folder of the run.", metavar="DIR", callback=o.run_name)] = "demo",
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Train for the importances here; the table that ships is left aside.")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """See it work: compress a small network that ships with depthfold for this machine's CPU, with real data."""
    from depthfold.demo.show import demo_settings, show

    settings = demo_settings(run, remeasure=remeasure)
    say(f"Compressing for this machine, as {Path(run) / 'config.toml'} says. Interrupted and run again, it goes on.")
    _summary(show(settings, say=say, progress=watched()), settings)


@app.command(epilog="Example: depthfold profile torchvision:resnet18 --input 3x224x224 --target openvino")
def profile(
    ctx: typer.Context, model: o.Model = None, run: o.Run = None, config: o.Config = None, weights: o.Weights = None,
    data: o.Data = None, input: o.Input = None, batch: o.Batch = None, ignore: o.Ignore = None, at: o.At = None,
    target: o.Target = None, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Measure latency, multiply-adds, parameters and memory: of a model, or before and after of a run."""
    with settings_of(ctx, "model", "target", looks=True) as settings:
        from depthfold.latency import profile as measure
        from depthfold.latency import side_by_side
        from depthfold.pipeline.holdings import has_result
        from depthfold.pipeline.stages import profile_stage
        from depthfold.pipeline.subject import Subject

        subject = Subject.of(settings)
        if has_result(settings):
            say(side_by_side(profile_stage(subject)))
        else:
            say(measure(subject.model, subject.inputs, subject.target))


def _summary(done: Compressed, settings: Settings) -> None:
    from depthfold.store.run_folder import REPORT, RESULT

    summary(done, (str(done.folder / name) for name in (REPORT, RESULT, *settings.export)))
