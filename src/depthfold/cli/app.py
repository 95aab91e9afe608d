"""The typer application: options made from the settings, error messages and exit codes.

Exit codes: 0 done, 1 unexpected error, 2 bad input or a known failure, 130 interrupted.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from depthfold.cli import terminal
from depthfold.cli.printing import print_error, print_text, progress, show_own_warnings_only
from depthfold.errors import DepthfoldError
from depthfold.pipeline.options import help_text
from depthfold.settings import Declaration, Settings, declarations, gather, keep, restored_after_errors
from depthfold.support.text import one_line
from depthfold.version import __version__

if TYPE_CHECKING:
    from depthfold.settings import Session

UNEXPECTED, KNOWN = 1, 2
DEBUG = "depthfold.debug"  # key in the context's meta, which a command shares with its group


class FlagsWithoutType:
    """A command whose --help shows no type beside flags. typer 0.29 shows <bool>, also beside --help itself."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class OneCommand(FlagsWithoutType, TyperCommand):
    """A single command."""


class Group(FlagsWithoutType, TyperGroup):
    """The commands. Turns an exception into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            show_own_warnings_only()
            try:
                return super().invoke(ctx)
            except (typer.Exit, typer.Abort):
                raise
            except (KeyboardInterrupt, Exception) as error:
                if hasattr(error, "format_message"):  # a wrong option: typer explains it
                    raise
                code = _explain(error)
                if ctx.meta.get(DEBUG):
                    print_error("Traceback", "".join(traceback.format_exception(error)), "dim")
        raise typer.Exit(code)


def _explain(error: BaseException) -> int:
    """Print the error as one paragraph and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        kind, _, text = terminal.INTERRUPTED.partition(": ")
        print_error(kind, text, "bold yellow")
        return terminal.EXIT_CODE
    if isinstance(error, DepthfoldError):
        print_error("Error", str(error), "bold red")
        return KNOWN
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        advice = "Check the path, its permissions and the free space, and run the same command again."
        print_error("Error", f"{place}{error.strerror or one_line(error)}. {advice}", "bold red")
        return KNOWN
    text = f"{type(error).__name__}: {one_line(error)} (run with --debug to see the traceback)"
    print_error("Unexpected error", text, "bold red")
    return UNEXPECTED


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        print_text(f"depthfold {__version__}")
        raise typer.Exit


def _set_debug(ctx: typer.Context, value: bool) -> None:
    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or value


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug)]
_CONFIG = Annotated[
    str | None,
    typer.Option("--config", help="A TOML file of settings, under the names of the options.", metavar="FILE"),
]
_FLAGS = {
    "retry": Annotated[bool, typer.Option("--retry", help=help_text("retry"))],
    "json": Annotated[bool, typer.Option("--json", help="Print JSON.")],
}


@app.callback(
    epilog="Example: depthfold compress torchvision:mobilenet_v2 --weights DEFAULT --data imagefolder:imagenet "
    "--input 3x224x224 --target onnxruntime --budget 60% --run out. Exit codes: 0 done, 1 unexpected error, 2 bad "
    "input or a known failure, 130 interrupted."
)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    """Compress a deep CNN into a shallow one that runs faster on your target.

    `compress` runs all stages; the other commands run one stage each. All commands share a run folder (--run). It keeps
    the settings, so that the next command needs only --run, and an interrupted command resumes from it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a command. `changed` is true if it was given any setting besides the run folder.

    The run folder keeps the settings if `keeps` is true.
    """

    settings: Settings
    changed: bool
    keeps: bool
    retry: bool = False
    json: bool = False

    def session(self) -> Session:
        """Return the session of this call, which reports its progress."""
        from depthfold.settings import Session  # imports torch

        return Session(settings=self.settings, progress=progress(), keeps=self.keeps)


Command = Callable[[Call], None]


def command(
    *, needs: str, uses: str = "", flags: str = "", keeps: bool = True, example: str
) -> Callable[[Command], Command]:
    """Register a command with the options for the settings that it needs and uses.

    The run folder keeps the settings, unless `keeps` is False. If the command fails, it gets its earlier ones back.
    """
    needed, known = needs.split(), {*needs.split(), *uses.split()}

    def register(function: Command) -> Command:
        def run_command(config: str | None, debug: bool, **values: Any) -> None:
            options = {name: values[name] for name in known if values[name] not in (None, [])}
            # A run can outlive its data: only a stage that needs the data finds out that they are gone.
            used = known if "data" in {*needed, *options} else known - {"data"}
            settings = gather(options, config, needs=needed, uses=used)
            importlib.import_module("depthfold.settings.stages")  # imports torch
            terminal.raise_on_interrupt()
            changed = config is not None or set(options) != {"run"}
            given = {name: values[name] for name in flags.split()}
            with restored_after_errors(settings):
                function(Call(settings=settings, changed=changed, keeps=keeps, **given))
            if keeps and settings.run is not None:
                keep(settings)

        run_command.__signature__ = inspect.Signature([*_parameters(known, flags.split())])  # type: ignore[attr-defined]
        app.command(function.__name__, cls=OneCommand, help=inspect.getdoc(function), epilog=f"Example: {example}")(
            run_command
        )
        return function

    return register


def _parameters(settings: Collection[str], flags: Collection[str]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command, from which typer makes its options."""
    options = {name: _option(declared) for name, declared in declarations().items() if name in settings}
    first = {name: options.pop(name) for name in ("model", "run")}
    both = {**first, "config": _CONFIG, **options, **{name: _FLAGS[name] for name in flags}, "debug": Debug}
    for name, annotation in both.items():
        default = False if name in flags or name == "debug" else None
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(declared: Declaration) -> Any:
    """Return the annotation that typer reads: the type, and the option or argument.

    Each option states its name: typer 0.27 takes it from the metavar otherwise."""
    if declared.name == "model":
        return Annotated[str | None, typer.Argument(help=declared.help, show_default=False)]
    name = declared.name.replace("_", "-")
    names = f"--{name}/--no-{name}" if declared.type in (bool, bool | None) else f"--{name}"
    option = typer.Option(
        names, help=declared.help, metavar=declared.metavar, rich_help_panel=declared.panel, show_default=False
    )
    return Annotated[_TYPES.get(declared.type, str) | None, option]


_TYPES: dict[Any, Any] = {bool: bool, bool | None: bool, int: int, float | None: float, tuple[str, ...]: list[str]}
