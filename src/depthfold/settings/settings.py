"""The settings of a run. Each is declared once, with its type, default, help text, check and path handling.

The options of the command line, the keys of config.toml and the checks follow from the declarations. Nothing here
imports torch at the top, so that --help does not wait for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, get_type_hints

from depthfold.core import Budget, Space, check_space, require_moves
from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.importance import MethodName, check_method
from depthfold.pipeline import Options
from depthfold.pipeline.options import help_text
from depthfold.settings.data import DATASETS, RECIPE_SUFFIXES, check_data, make_recipe
from depthfold.settings.executors import make_executor
from depthfold.settings.user_file import check_model_file, names_file
from depthfold.store.run_folder import require_name
from depthfold.support.coerce import as_float, as_text, as_whole
from depthfold.support.document import encode_fields
from depthfold.support.text import did_you_mean

NETWORK, IMPORTANCE, FINE_TUNING = "Network", "Importance", "Fine-tuning"  # panels of --help
_KEY = "declaration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declaration of a setting. `check` gets a value of the right type; `anchor` gets text."""

    name: str = ""
    type: Any = None
    help: str
    metavar: str | None = None
    panel: str | None = None
    missing: str = ""  # what to do if a command needs the setting and it is not given
    check: Callable[[Any], object] = lambda _: None
    anchor: Callable[[str, Path], Any] = lambda text, _: text  # make the value independent of the present folder


def _setting(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: Declaration(help=help, **more)})


def _option(name: str, extra: str = "", **more: Any) -> Any:
    """Declare a setting that is an option of compress(), with its help and, unless given, its default."""
    (option,) = (field for field in dataclasses.fields(Options) if field.name == name)
    default = more.pop("default", option.default)
    return _setting(default, f"{help_text(name)} {extra}".rstrip(), **more)


def image_size(text: str) -> tuple[int, int, int]:
    """Return channels, height and width of "3x224x224"."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidValue(f"The input size {text!r} is not valid. Write channels x height x width: 3x224x224.")
    channels, height, width = map(int, parts)
    return channels, height, width


def _check_target(text: str) -> None:
    from depthfold.backends import get  # imports torch

    get(text)


def _check_exports(names: Collection[str]) -> None:
    from depthfold.pipeline.preflight import check_exports  # imports torch

    check_exports(names)


def _check_layout(text: str) -> None:
    from depthfold.backends.raw_images import require_layout  # imports torch

    require_layout(text)


def _check_table(name: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not Path(text).is_file():
            raise InvalidValue(f"There is no {name} table {text}. Check the path given with --{name}.")

    return check


def _anchor_path(text: str, base: Path) -> str:
    return str((base / Path(text).expanduser()).absolute())


def _anchor_run(text: str, base: Path) -> str:
    return _anchor_path(require_name(text), base)


def _anchor_model(text: str, base: Path) -> str:
    return _anchor_path(text, base) if names_file(text) else text


def _anchor_data(text: str, base: Path) -> str:
    kind, colon, path = text.partition(":")
    if kind in DATASETS and path and not names_file(text):
        return f"{kind}{colon}{_anchor_path(path, base)}"
    return _anchor_model(text, base)


def _anchor_weights(text: str, base: Path) -> str:
    from depthfold.settings.models import is_weights_file  # imports torch

    path = _anchor_path(text, base)
    return path if is_weights_file(path) else text


def _anchor_recipe(text: str, base: Path) -> str | Mapping[str, Any]:
    """Return the fields of a recipe in a file: the run must not need the file later, nor change with it."""
    if Path(text).suffix not in RECIPE_SUFFIXES:
        return text
    path = _anchor_path(text, base)
    try:
        fields = encode_fields(make_recipe(path))
    except DepthfoldError:
        return path  # a command that uses the recipe says what is wrong with the file
    return {name: value for name, value in fields.items() if value is not None}  # TOML has no null; None is the default


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a command, under the names of the options and of the keys in config.toml. Paths are absolute."""

    model: str | None = _setting(
        None,
        "torchvision:NAME, timm:NAME, or file.py:function, which returns an nn.Module. Arguments of a library's model "
        "follow its name: torchvision:resnet18,num_classes=10. Not needed if the run folder already knows the model.",
        missing="There is no model. Give torchvision:NAME, timm:NAME or file.py:function.",
        check=check_model_file,
        anchor=_anchor_model,
    )
    run: str | None = _setting(
        None,
        "The run folder. All results go there, and an interrupted command resumes from there.",
        metavar="DIR",
        missing="There is no run folder. Give one with --run DIR; it is created if it does not exist.",
        anchor=_anchor_run,
    )
    weights: str | None = _setting(
        None,
        "A state dict (.safetensors, .pt or .pth), or the name of the library's weights: DEFAULT for torchvision, "
        "pretrained for timm.",
        metavar="FILE",
        panel=NETWORK,
        anchor=_anchor_weights,
    )
    data: str | None = _setting(
        None,
        "cifar10:PATH, cifar100:PATH, fashion-mnist:PATH, imagefolder:PATH, or file.py:function, which returns a task.",
        metavar="DATA",
        panel=NETWORK,
        missing="There is no data. Give it with --data: cifar10:PATH, imagefolder:PATH or file.py:function.",
        check=check_data,
        anchor=_anchor_data,
    )
    input: str | None = _setting(
        None,
        "Channels, height and width of an image: 3x224x224. Default: the size of the images in the data. A model of "
        "torchvision or timm without data, or with an image folder, gets the size that it was made for.",
        metavar="CxHxW",
        panel=NETWORK,
        check=image_size,
    )
    batch: int = _setting(1, "Batch size at which latency is measured. Default: 1.", panel=NETWORK)
    ignore: tuple[str, ...] = _setting(
        (),
        "A submodule to leave unchanged, by name; only its batch norms are folded. May be repeated.",
        metavar="NAME",
        panel=NETWORK,
    )
    submodule: str | None = _option("at", metavar="NAME", panel=NETWORK)
    target: str | None = _setting(
        None,
        "The runtime to measure on, with its options: onnxruntime:threads=2, openvino, pytorch:device=cuda, tensorrt, "
        "inductor, cost_model.",
        metavar="TARGET",
        missing="There is no target. Give the runtime to measure on with --target, for example onnxruntime.",
        check=_check_target,
    )
    budget: str | float | None = _setting(
        None,
        "The latency to reach: 60% of the original, 12.5ms, or 1.6x as fast.",
        metavar="BUDGET",
        missing="There is no budget. Give the latency to reach with --budget: 60%, 12.5ms or 1.6x.",
        check=Budget.parse,
    )
    allow_doubtful: bool = _option("allow_doubtful")
    space: Space = _option(  # noqa: RUF009  # it returns a dataclass field, as for the others
        "space", "Default: paper.", metavar="SPACE", check=check_space
    )
    moves: tuple[str, ...] = _option("moves", "May be repeated. Default: merge.", metavar="MOVE", check=require_moves)
    alpha: float | None = _option("alpha")
    surrogate: bool = _option("surrogate")
    export: tuple[str, ...] = _option(
        "exports", "May be repeated. Default: model.onnx.", metavar="NAME", check=_check_exports
    )
    raw_images: str | None = _option("raw_images", metavar="LAYOUT", check=_check_layout)
    int8: bool = _option("int8")
    latency: str | None = _option(
        "latency",
        "A JSON or CSV file. It must be of the same network and runtime.",
        metavar="FILE",
        check=_check_table("latency"),
        anchor=_anchor_path,
    )
    importance: str | None = _option(
        "importance",
        "A JSON or CSV file.",
        metavar="FILE",
        panel=IMPORTANCE,
        check=_check_table("importance"),
        anchor=_anchor_path,
    )
    method: MethodName = _option(  # noqa: RUF009
        "importance_method", "Default: brief.", metavar="METHOD", panel=IMPORTANCE, check=check_method
    )
    importance_recipe: str | Mapping[str, Any] | None = _option(
        "importance_recipe",
        "A preset, or a TOML or JSON file.",
        metavar="RECIPE",
        panel=IMPORTANCE,
        check=make_recipe,
        anchor=_anchor_recipe,
    )
    executor: str = _option(
        "executor",
        "One of inline, processes:2, processes:2,threads=1, ray, ray:address=auto,gpus=0.25.",
        default="inline",
        metavar="EXECUTOR",
        panel=IMPORTANCE,
        check=make_executor,
    )
    reinit: bool | None = _option("reinit", panel=IMPORTANCE)
    recipe: str | Mapping[str, Any] = _option(
        "recipe",
        "A preset, or a TOML or JSON file. Default: quick.",
        metavar="RECIPE",
        panel=FINE_TUNING,
        check=make_recipe,
        anchor=_anchor_recipe,
    )
    distil: bool = _option("distil", "Default: --distil.", panel=FINE_TUNING)

    @classmethod
    def checked(cls, table: Mapping[str, Any], *, needs: Collection[str], uses: Collection[str]) -> Self:
        """Return the settings in a table, or raise InvalidValue with all problems.

        Settings in `needs` must be there. Those in `needs` and `uses` must be valid; the others belong to other
        commands and are only kept."""
        found = tuple(_problems(table, needs, {*needs, *uses}))
        if len(found) == 1:
            raise InvalidValue(found[0])
        if found:
            listed = "\n".join(f"  - {problem}" for problem in found)
            raise InvalidValue(f"{len(found)} settings are missing or not valid:\n{listed}")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        return cls(**fields)

    def need(self, name: str) -> str:
        """Return a setting that is text. Raise InvalidValue if it is missing."""
        if (value := getattr(self, name)) is None:
            raise InvalidValue(declarations()[name].missing)
        return as_text(f"The setting {name!r}", value, InvalidValue)

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width of the input, if it was given."""
        return None if self.input is None else image_size(self.input)


@cache
def declarations() -> Mapping[str, Declaration]:
    """Return the declaration of each setting by its name, in the order of the fields."""
    types = get_type_hints(Settings)
    return {
        field.name: dataclasses.replace(field.metadata[_KEY], name=field.name, type=types[field.name])
        for field in dataclasses.fields(Settings)
    }


def _problems(table: Mapping[str, Any], needs: Collection[str], uses: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with a table of settings: unknown names, missing settings, values that are not valid."""
    known = declarations()
    for key in table:
        if key not in known:
            yield f"There is no setting {key!r}. {did_you_mean(key, known)}The settings are {', '.join(known)}."
    for name, declared in known.items():
        if name in table and name in uses:
            try:
                _check_type(declared, table[name])
                declared.check(table[name])
            except DepthfoldError as error:
                yield str(error)
        elif name in needs and name not in table:
            yield declared.missing


def _check_type(declared: Declaration, value: Any) -> None:
    """Raise InvalidValue if a value is not of the setting's type; in a TOML file it may be of any."""
    what, wanted = f"The setting {declared.name!r}", declared.type
    if wanted == tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise InvalidValue(f"{what} must be a list of strings, found {value!r}.")
    elif wanted in (str | Mapping[str, Any], str | Mapping[str, Any] | None):
        if not isinstance(value, str | Mapping):
            raise InvalidValue(f"{what} must be the name of a preset, a file or a table, found {value!r}.")
    elif wanted in (bool, bool | None):
        if not isinstance(value, bool):
            raise InvalidValue(f"{what} must be true or false, found {value!r}.")
    elif wanted is int:
        as_whole(what, value, InvalidValue)
    elif wanted == float | None:
        if not math.isfinite(as_float(what, value, InvalidValue, "a finite number")):
            raise InvalidValue(f"{what} must be a finite number, found {value!r}.")
    elif wanted != str | float | None:  # a number as budget is refused by its own check, which shows the units
        as_text(what, value, InvalidValue)
