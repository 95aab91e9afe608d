"""A finished run that is started again with the same settings measures nothing; only the scores are computed again."""

import importlib
from dataclasses import replace

import pytest

from cli_workshop import depthfold
from depthfold.core import Profiles
from depthfold.reporting import Findings

PROFILED = "latency and memory: 3 of 3, done"


def again(run, *arguments, command="compress"):
    """Run a command again and return what it has printed to stderr."""
    result = depthfold(command, "--run", run, *arguments)
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.fixture
def findings(run):
    return lambda: Findings.loads((run / "findings.json").read_text())


def test_networks_are_scored_but_not_profiled_again(run, findings):
    first, profiles = findings(), (run / "profiles.json").read_bytes()
    said = again(run)
    assert PROFILED not in said and "scored batches: 2 of 2, done" in said
    assert (findings().before, findings().after) == (first.before, first.after)
    assert (run / "profiles.json").read_bytes() == profiles


def test_deleted_profiles_are_measured_again(run):
    (run / "profiles.json").unlink()
    assert PROFILED in again(run)
    assert PROFILED not in again(run)


def test_unreliable_profiles_are_measured_again(run, findings):
    kept = Profiles.loads((run / "profiles.json").read_text())
    latency = kept.after.latency
    disturbed = replace(kept, after=replace(kept.after, quartiles=(latency, latency, 2 * latency)))
    (run / "profiles.json").write_text(disturbed.dumps())
    assert PROFILED in again(run)
    assert findings().after == kept.after
    assert PROFILED not in again(run)


def test_profiles_of_another_plan_are_not_used(run):
    assert PROFILED in again(run, "--budget", "100%")
    assert PROFILED not in again(run)


def test_profiles_of_another_target_are_not_used(run, findings):
    first = findings()
    again(run, "--target", "cost_model:launch_us=1.0", command="report")
    assert findings().before != first.before
    assert PROFILED in again(run)
    assert findings().before == first.before


def test_profiles_of_another_version_are_not_used(run, monkeypatch):
    monkeypatch.setattr(importlib.import_module("depthfold.pipeline.artefacts"), "__version__", "1000.0")
    assert PROFILED in again(run)


def test_another_recipe_trains_a_network_of_the_same_speed(run):
    assert PROFILED not in again(run, "--no-distil")


def test_a_report_that_measures_again_replaces_the_profiles(run, findings):
    """Otherwise the next compress would put unreliable profiles back into the report."""
    kept = Profiles.loads((run / "profiles.json").read_text())
    (run / "profiles.json").write_text(kept.dumps().replace('"count": ', '"count": 1'))
    assert PROFILED in again(run, "--target", "cost_model", command="report")
    assert Profiles.loads((run / "profiles.json").read_text()) == kept
    again(run)
    assert findings().before == kept.before
