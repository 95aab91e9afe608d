"""Every option, once. Their names are those of the settings, and of config.toml.

An option whose metavar is its own name in capitals states that name: typer 0.27 would call it --TARGET otherwise.
"""

from __future__ import annotations

from typing import Annotated

import typer

from depthfold.cli.group import DEBUG
from depthfold.store.run_folder import expect_name


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or value
    return value


def run_name(value: str | None) -> str | None:
    return expect_name(value)


_NETWORK = "The network"

Model = Annotated[
    str | None,
    typer.Argument(
        help="torchvision:NAME, timm:NAME, or file.py:function, which returns an nn.Module. Options of a library's "
        "model follow its name: torchvision:resnet18,num_classes=10. Not needed where --run knows it.",
        show_default=False,
    ),
]
Run = Annotated[
    str | None,
    typer.Option(
        help="The folder of the run: everything goes there, and a command that is run again goes on there.",
        metavar="DIR",
        callback=run_name,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(help="A TOML file with any of the settings, by the names of the options.", metavar="FILE"),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_remember)]

Weights = Annotated[
    str | None,
    typer.Option(
        help="A state dict: .safetensors, .pt or .pth. Or a name that the library knows: DEFAULT for torchvision, "
        "pretrained for timm.",
        metavar="FILE",
        rich_help_panel=_NETWORK,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="cifar10:PATH, cifar100:PATH, fashion-mnist:PATH, imagefolder:PATH, or file.py:function, which returns a "
        "task.",
        metavar="DATA",
        rich_help_panel=_NETWORK,
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        help="Channels, height and width of an image: 3x224x224. Without it, those of the data.",
        metavar="CxHxW",
        rich_help_panel=_NETWORK,
    ),
]
Batch = Annotated[
    int | None, typer.Option(help="Images at a time when latency is measured. Default: 1.", rich_help_panel=_NETWORK)
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        help="A submodule that stays as it is, by name; only its batch norms are folded. May be given again.",
        rich_help_panel=_NETWORK,
    ),
]
At = Annotated[
    str | None, typer.Option(help="Fold only this submodule: backbone, for example.", rich_help_panel=_NETWORK)
]

Space = Annotated[
    str | None,
    typer.Option(
        "--space", help="Which blocks may merge: paper, or full for all that can. Default: paper.", metavar="SPACE"
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="The runtime to measure on, with options: onnxruntime:threads=2, openvino, pytorch:device=cuda, tensorrt, "
        "inductor, cost_model.",
        metavar="TARGET",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", help="How long it may take: 60% of the original, 12.5ms, or 1.6x as fast.", metavar="BUDGET"
    ),
]
Trainings = Annotated[
    str | None,
    typer.Option(
        help="The recipe of the importances: a preset or a TOML or JSON file. Default: importance.", metavar="RECIPE"
    ),
]
Importance = Annotated[
    str | None,
    typer.Option(help="Use this importance table, JSON or CSV, instead of training for one.", metavar="FILE"),
]
Executor = Annotated[
    str | None,
    typer.Option(
        "--executor",
        help="Who trains: inline, processes:2, processes:2,threads=1, ray, ray:address=auto,gpus=0.25. "
        "Default: inline.",
        metavar="EXECUTOR",
    ),
]
Afresh = Annotated[
    bool | None,
    typer.Option(
        "--afresh/--as-they-are",
        help="Whether a block of one layer is trained from nothing, as in the paper. In trainings of a few steps it "
        "does not come back, and as-they-are is meant for those. Default: afresh.",
        show_default=False,
    ),
]
Retry = Annotated[
    bool,
    typer.Option("--retry", help="Try again what has failed before: blocks that the runtime rejected, trainings."),
]
Alpha = Annotated[
    float | None, typer.Option(help="Even out the importances; the paper uses 1.2 to 1.8. Default: as they are.")
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe", help="The recipe of fine-tuning: a preset or a TOML or JSON file. Default: quick.", metavar="RECIPE"
    ),
]
Distil = Annotated[
    bool | None,
    typer.Option(
        "--distil/--no-distil",
        help="Whether the original teaches the folded network. Default: distil.",
        show_default=False,
    ),
]
Export = Annotated[
    list[str] | None,
    typer.Option(
        help="A file to write into the run folder: .onnx, .pt2, .xml or .engine. May be given again. Default: "
        "model.onnx.",
        metavar="NAME",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
