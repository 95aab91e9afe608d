"""The methods of measuring importances, with their recipes and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from depthfold.errors import InvalidValue
from depthfold.support.text import did_you_mean
from depthfold.training import Recipe, preset

MethodName = Literal["trained", "brief", "recalibrated", "local", "fit"]

RECALIBRATION = 4  # batches over which batch norms are recalibrated after "brief", "local" and "fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method with its settings.

    - "trained": the whole network is trained with the task's loss, as in the paper.
    - "brief": the whole network learns the outputs of the original for a few steps.
    - "recalibrated": nothing is trained.
    - "local": only the block is trained, to reproduce the original's values at its end.
    - "fit": the merged convolution is computed by least squares.

    All but the first recalibrate the batch norms before the network is scored. The first two use the task's score; the
    others compare outputs with those of the original if the task can do that (OutputTask).
    """

    name: MethodName
    recipe: Recipe
    reinit: bool

    @classmethod
    def of(cls, name: object, recipe: Recipe | str | None = None, reinit: bool | None = None) -> Self:
        """Return the method. By default, the recipe is the method's preset, and "trained" reinitialises layers."""
        check_method(name)
        if reinit and name != "trained":
            raise InvalidValue(
                f'The method {name!r} reinitialises no layer; only "trained" does. Leave out reinit=True (--reinit), '
                'or use method="trained" (--method trained).'
            )
        if recipe is None:
            recipe = "importance" if name == "trained" else str(name)
        found = preset(recipe) if isinstance(recipe, str) else recipe
        if not isinstance(found, Recipe):
            raise InvalidValue(f"measure_importance() takes a Recipe or the name of a preset, found {recipe!r:.80}.")
        method = cls(name=name, recipe=found, reinit=name == "trained" if reinit is None else reinit)  # type: ignore[arg-type]
        method._check_recipe()
        return method

    @property
    def groups_blocks(self) -> bool:
        """True if one job measures many blocks, which share the forwards of the original."""
        return self.name == "local"

    @property
    def compares_outputs(self) -> bool:
        """True if the network is scored by how close its outputs are to those of the original, without labels."""
        return self.name in ("recalibrated", "local", "fit")

    def depends_on(self) -> dict[str, Any]:
        """Return the settings that importances depend on."""
        found = {"method": self.name, "recipe": self.recipe.to_json(), "reinit": self.reinit}
        return found | ({"recalibration": RECALIBRATION} if self._recalibrates_afterwards else {})

    def __str__(self) -> str:
        if self.name == "trained":
            return f"{self.recipe}{'' if self.reinit else NO_REINIT}"
        batches = f"; recalibrated on {RECALIBRATION} batches" if self._recalibrates_afterwards else ""
        return f"{self.name}; {self.recipe}{batches}"

    @property
    def _recalibrates_afterwards(self) -> bool:
        """True if batch norms are recalibrated on RECALIBRATION batches after the steps of the recipe."""
        return self.name in ("brief", "local", "fit")

    def _check_recipe(self) -> None:
        if self.name == "brief" and self.recipe.keep == "best":
            raise InvalidValue(
                'The method "brief" scores the network only once, so its recipe cannot keep the weights of the best '
                'score. Use recipe.replace(keep="last"), or method="trained" (--method trained).'
            )
        if self.name == "local" and self.recipe.precision == "float16":
            raise InvalidValue(
                'The method "local" does not scale its losses, so float16 gradients would vanish. Use '
                'recipe.replace(precision="bfloat16").'
            )


NO_REINIT = "; reinit=False"  # in the provenance


def check_method(name: object) -> None:
    """Raise InvalidValue if this is not the name of a method."""
    known = get_args(MethodName)
    if name not in known:
        hint = did_you_mean(str(name), known)
        raise InvalidValue(f"There is no method {name!r}. {hint}The methods are {', '.join(map(repr, known))}.")
