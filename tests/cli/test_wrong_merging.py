"""A plan whose merging is wrong is found out when it is chosen, not after the training that it would have cost."""

import importlib
import shutil
from dataclasses import replace

import pytest

import depthfold as df
from cli_workshop import depthfold, refused
from depthfold.errors import VerificationError

# Modules by name: some share theirs with the function inside.
merging, compressing, staging, choosing = (
    importlib.import_module(f"depthfold.{name}")
    for name in ("merging.merge", "pipeline.compression", "pipeline.stages", "pipeline.choice")
)


@pytest.fixture
def measured(run):
    """A run with both tables, where nothing was chosen and nothing was trained."""
    for name in ("students", "result"):
        shutil.rmtree(run / name)
    for name in ("choice.json", "result.txt", "findings.json"):
        (run / name).unlink()
    return run


@pytest.fixture
def wrong(monkeypatch):
    """Every merged kernel is a little too large; whoever trains nevertheless fails in other words."""
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
    "Error: The plan that was chosen for the budget of 80% cannot be used, and nothing was trained for it. The merged "
    "network does not compute what the rewritten one computes: largest error at the borders"
)
NEXT = (
    "Meanwhile, ask for another budget, whose plan may merge, or leave out what does not: ignore=... in Python, "
    "--ignore on the command line, in a run folder of its own."
)


@pytest.mark.parametrize("command", ["compress", "solve"])
def test_no_training_begins(command, measured, wrong):
    for _ in range(2):  # and it is not taken for granted the second time
        said = refused(command, "--run", measured, "--budget", "80%")
        assert SAID in said and "please report the model." in said and said.endswith(NEXT)
    assert not (measured / "students").exists() and not (measured / "choice.json").exists()
    assert "has no choice.json yet. Run: depthfold solve" in refused("finetune", "--run", measured)


def test_the_error_is_that_of_a_verification(measured, wrong, monkeypatch):
    """Of the function, for whoever calls it from Python."""
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


def test_a_run_that_goes_on_does_not_merge_once_more(run, monkeypatch):
    def merge(_):
        raise AssertionError("merged again")

    monkeypatch.setattr(choosing, "merge", merge)
    for command in ("compress", "solve"):
        done = depthfold(command, "--run", run)
        assert done.exit_code == 0, done.output
