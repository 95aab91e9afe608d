"""The commands. Each states the settings that it needs and uses, and runs a stage.

`settings.stages` is imported when a command runs, so that --help does not wait for torch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from depthfold import settings
from depthfold.cli import terminal
from depthfold.cli.app import Call, Debug, OneCommand, app, command
from depthfold.cli.printing import print_summary, print_text, progress
from depthfold.store.run_folder import PLAN, require_name

MODEL = "model weights data input batch ignore submodule"
TRAINING = "method importance_recipe executor importance reinit"


@command(
    needs="model",
    uses=f"run {MODEL} target latency space moves method importance_recipe reinit",
    flags="json",
    keeps=False,
    example="depthfold inspect torchvision:mobilenet_v2 --target onnxruntime",
)
def inspect(call: Call) -> None:
    """Show which layers can be merged, and why others cannot.

    With a target, measure the latency of every block, and show what can be gained there and what the importances cost.
    """
    session = call.session()
    traced = session.trace()
    network = traced.network
    if call.settings.target is None:
        print_text(network.dumps() if call.json else network)
        return
    cost = settings.stages.cost_stage(session, traced)
    if not call.json:
        print_text(f"{network}\n" + (f"\nThe latency table: {cost}." if cost else ""))
    found = settings.stages.prospects_stage(session, traced)
    if call.json:
        gain, price = None if found is None else found.to_json(), None if cost is None else dataclasses.asdict(cost)
        print_text(json.dumps({"network": network.to_json(), "cost": price, "prospects": gain}))
    else:
        print_text(found or "A layer has no time, so nothing can be compared: see the warnings.")


@command(
    needs="run model target",
    uses=f"{MODEL} latency space moves",
    flags="retry",
    example="depthfold latency file.py:model --input 3x32x32 --target onnxruntime:threads=2 --run out",
)
def latency(call: Call) -> None:
    """Measure the latency of every block on the target (T in the paper). Writes latency.json."""
    print_text(settings.stages.latency_stage(call.session(), retry=call.retry))


@command(
    needs="run model",
    uses=f"{MODEL} target budget allow_doubtful space moves {TRAINING}",
    flags="retry",
    example="depthfold importance --run out --data cifar10:data --executor processes:2",
)
def importance(call: Call) -> None:
    """Measure the importance of every block on the data (I in the paper). Writes importance.json."""
    print_text(settings.stages.importance_stage(call.session(), retry=call.retry))


@command(
    needs="run model data",
    uses=f"{MODEL} target budget allow_doubtful space moves executor",
    example="depthfold surrogate --run out --executor processes:2",
)
def surrogate(call: Call) -> None:
    """Train some whole plans and fit their scores, for solve --surrogate. Writes surrogate.json."""
    print_text(settings.stages.surrogate_stage(call.session()))


@command(
    needs="run",
    uses=f"{MODEL} target budget importance alpha surrogate",
    example="depthfold solve --run out --budget 60%",
)
def solve(call: Call) -> None:
    """Show all optimal plans. With a budget, choose the plan that meets it when measured; writes plan.json."""
    session = call.session()
    frontier = settings.stages.frontier_stage(session, session.importance)
    print_text(frontier)
    if session.settings.budget is not None:
        plan = settings.stages.plan_stage(session, frontier)
        print_text(f"\nChosen for the budget of {session.settings.budget}:\n{plan}")
        if plan.measured is not None and plan.measured.unreliable:
            print_text(f"\nWhen the machine is quiet, delete {session.folder.path / PLAN} and run this command again.")
    settings.stages.keep_importance(session)


@command(needs="run model data", uses=f"{MODEL} recipe distil", example="depthfold finetune --run out --recipe quick")
def finetune(call: Call) -> None:
    """Fine-tune the network of the chosen plan. Keeps checkpoints in students/."""
    folder = settings.stages.finetune_stage(call.session())
    print_text(f"Fine-tuned. The metrics are in {folder}.")


@command(needs="run model", uses=MODEL, example="depthfold merge --run out")
def merge(call: Call) -> None:
    """Merge the fine-tuned network, verify that it computes the same, and save it. Writes result/."""
    print_text(settings.stages.merge_stage(call.session()))


@command(
    needs="run model",
    uses=f"{MODEL} export raw_images int8",
    example="depthfold export --run out --export model.onnx --int8",
)
def export(call: Call) -> None:
    """Write the merged network to files that run without depthfold, and compare each with PyTorch."""
    for exported in settings.stages.export_stage(call.session()):
        print_text(exported)


@command(needs="run", uses=f"{MODEL} target alpha surrogate", keeps=False, example="depthfold report --run out")
def report(call: Call) -> None:
    """Write report.html. Measures and scores both networks, unless that was done before and only --run is given."""
    print_text(settings.stages.report_stage(call.session(), remeasure=call.changed))


@command(
    needs="run model data target budget",
    uses=f"{MODEL} latency allow_doubtful space moves {TRAINING} alpha surrogate recipe distil export raw_images int8",
    flags="retry",
    example="depthfold compress file.py:model --data file.py:data --target onnxruntime --budget 60% --run out",
)
def compress(call: Call) -> None:
    """Run all stages: from a CNN to a faster one, with a report. Run it again to resume after an interruption."""
    session = call.session()
    done = settings.stages.compress_stage(session, settings.stages.preflight(session), retry=call.retry)
    print_summary(done, [str(each.path.relative_to(done.folder)) for each in done.exported])


@app.command(cls=OneCommand, epilog="Example: depthfold demo --run demo")
def demo(
    run: Annotated[str, typer.Option("--run", help="The run folder.", metavar="DIR", callback=require_name)] = "demo",
    debug: Debug = False,
) -> None:
    """Compress a small network that ships with depthfold for this machine's CPU, with real data."""
    from depthfold.demo import demo_settings, run_demo

    terminal.raise_on_interrupt()
    chosen = demo_settings(run)
    print_text(f"The settings are in {Path(run) / 'config.toml'}. Run the same command again to resume.")
    print_summary(run_demo(chosen, say=print_text, progress=progress()), chosen.export)


@command(
    needs="model target",
    uses=f"run {MODEL}",
    keeps=False,
    example="depthfold profile torchvision:resnet18 --input 3x224x224 --target openvino",
)
def profile(call: Call) -> None:
    """Measure latency, multiply-adds, parameters and memory of a model, or of a run before and after."""
    print_text(settings.stages.profile_stage(call.session()))


__all__ = ["app"]
