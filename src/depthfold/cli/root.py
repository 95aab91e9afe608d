"""What all commands share: the name, the version, the words that `depthfold --help` begins with."""

from __future__ import annotations

from typing import Annotated

import typer

from depthfold.cli import options as o
from depthfold.cli.group import Group
from depthfold.cli.printing import say
from depthfold.version import __version__

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        say(f"depthfold {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Example: depthfold compress torchvision:mobilenet_v2 --weights DEFAULT --data imagefolder:imagenet "
    "--input 3x224x224 --target onnxruntime --budget 60% --run out. Exit codes: 0 done, 1 unexpected error, 2 bad "
    "input or a known failure, 130 interrupted."
)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Folds a deep CNN into a shallow one that runs faster on the machine you name.

    `compress` does all of it; the other commands do one stage each. All of them work in one folder (--run), go on there
    when they were interrupted, and remember what they were told: the next one needs only --run.
    """
