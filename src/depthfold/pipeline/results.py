"""What a run makes of a plan: a student in a folder of its own, and the result, of which old findings are forgotten."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from torch import nn

from depthfold.core import Plan
from depthfold.exporting import save
from depthfold.store.run_folder import FINDINGS, RESULT, RESULT_OF, STUDENTS, RunFolder
from depthfold.training import Recipe


def student_folder(folder: RunFolder, plan: Plan, recipe: Recipe, *, distil: bool) -> Path:
    """Where the student of a plan is trained by a recipe. Another budget or recipe has another folder, so a run can try
    several and lose none."""
    made_from = (sorted(plan.activations), sorted(plan.cuts), recipe.to_json(), distil)
    return folder.path / STUDENTS / hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]


def keep_result(folder: RunFolder, shallow: nn.Module, student: Path) -> None:
    """Save the merged network, and which student it is of. What was found of the one before goes first, and so does
    the name of its student: a kill in between leaves a result that nothing is said of, and that is merged again."""
    folder.forget(FINDINGS)
    folder.forget(RESULT_OF)
    save(shallow, folder.path / RESULT)
    folder.write_text(RESULT_OF, student.name + "\n")
