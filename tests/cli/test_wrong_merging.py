"""A plan whose merging is wrong is refused when it is chosen, before any training."""

import importlib
import shutil
from dataclasses import replace

import pytest

import depthfold as df
from cli_workshop import depthfold, refused
from depthfold.errors import VerificationError

# By name, because some modules share their name with a function.
merging, compressing, staging, choosing = (
    importlib.import_module(f"depthfold.{name}")
    for name in ("merging.merge", "pipeline.compression", "settings.stages", "pipeline.artefacts")
)


@pytest.fixture
def measured(run):
    """Return a run with both tables, but without a plan or a training."""
    for name in ("students", "result"):
        shutil.rmtree(run / name)
    for name in ("plan.json", "findings.json"):
        (run / name).unlink()
    return run


@pytest.fixture
def wrong(monkeypatch):
    """Make every merged kernel a little too large, and every training fail with another message."""
    right = merging.segment_kernel

    def kernel(*given):
        found = right(*given)
        return replace(found, weight=1.01 * found.weight)

    def train(*_, **__):
        raise AssertionError("a training began")

    monkeypatch.setattr(merging, "segment_kernel", kernel)
    for module in (compressing, staging):
        monkeypatch.setattr(module, "finetune", train)


SAID = (
    "Error: The plan for the budget of 80% cannot be used, and nothing was trained for it. The merged "
    "network does not compute the same function as the rewritten one: largest error at the borders"
)
NEXT = (
    "Try another budget, whose plan may merge, or leave out the layers that do not merge with ignore=... (--ignore), "
    "in another run folder."
)


@pytest.mark.parametrize("command", ["compress", "solve"])
def test_no_training_starts(command, measured, wrong):
    for _ in range(2):  # the plan is not accepted the second time
        said = refused(command, "--run", measured, "--budget", "80%")
        assert SAID in said and "please report the model." in said and said.endswith(NEXT)
    assert not (measured / "students").exists() and not (measured / "plan.json").exists()
    assert "has no plan.json yet. Run: depthfold solve" in refused("finetune", "--run", measured)


def test_the_error_is_a_verification_error(measured, wrong, monkeypatch):
    """Raised by compress() itself, for callers from Python."""
    errors = []

    def noted(*given, **more):
        try:
            return df.compress(*given, **more)
        except VerificationError as error:
            errors.append(error)
            raise

    monkeypatch.setattr(staging, "compress", noted)
    refused("compress", "--run", measured)
    assert isinstance(errors[0].__cause__, VerificationError) and str(errors[0].__cause__) in str(errors[0])


def test_a_resumed_run_does_not_merge_again(run, monkeypatch):
    def merge(_):
        raise AssertionError("merged again")

    monkeypatch.setattr(choosing, "merge", merge)
    for command in ("compress", "solve"):
        done = depthfold(command, "--run", run)
        assert done.exit_code == 0, done.output
