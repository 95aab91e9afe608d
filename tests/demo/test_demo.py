"""The demo: the shipped files, and a run with a budget that can and with one that cannot be met."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import depthfold as df
from cli_workshop import depthfold, without_memory
from depthfold import demo
from depthfold.core import Score
from depthfold.demo import demo_settings, run_demo
from depthfold.demo.network import SHIPPED, InvertedResidual
from depthfold.errors import BudgetError
from depthfold.latency.choose import reachable_budget
from depthfold.reporting import Findings
from depthfold.settings import Settings


@pytest.mark.slow
def test_the_network_has_its_recorded_accuracy():
    record = json.loads((SHIPPED / "network.json").read_text())
    task = demo.task()
    assert (task.count("holdout"), task.count("test")) == (200, 5_000)
    assert record["accuracy on the 10,000 test images"] >= 91
    # Half of these images: the standard error of the difference is 0.3 points.
    score = task.score(demo.model(), "test")
    assert score == pytest.approx(record["accuracy on the 10,000 test images"], abs=1.0)
    assert score == pytest.approx(91.18, abs=0.1)  # as in docs/demo.md; another processor may round differently


def test_residuals_are_dropped_in_training_only():
    """Each image keeps its residual or not; the mean is unchanged."""
    block = InvertedResidual(4, 4, 1, 2, drop=0.5).train()
    x = torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    whole = block.body(x)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = block(x)
    found = [torch.equal(one, bare) for one, bare in zip(out, x, strict=True)]
    assert 0 < sum(found) < 16
    kept = ~torch.tensor(found)
    torch.testing.assert_close(out[kept], (x + 2 * whole)[kept])
    block.eval()
    torch.testing.assert_close(block(x), x + block.body(x))


def test_the_settings_are_as_documented():
    settings = demo_settings("run")
    assert float(settings.budget.rstrip("%")) <= 100 / 1.4
    assert "model.onnx" in settings.export
    assert (settings.importance, settings.alpha) == (None, None)  # measured here, and not normalised by hand
    assert settings.recipe["distillation"] > 0


def test_the_package_stays_small():
    package = Path(df.__file__).parent
    size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert size < 10e6


@pytest.fixture(autouse=True)
def memory_not_measured():
    with without_memory():
        yield


# The demo's images, but few to score, because scoring all takes as long as the rest of these runs.
FEW = """
import depthfold as df
from depthfold import demo

def task():
    source = demo.task().source
    train, test = (source.read(part) for part in ("train", "test"))
    few = [(part.images.pixels[:number], part.labels[:number]) for part, number in ((train, 2_000), (test, 100))]
    return df.ClassificationTask.tensors(train=few[0], test=few[1], holdout=0.03)
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return a function for the demo's settings with the cost model, hardly any training and made-up importances."""
    folder = tmp_path_factory.mktemp("quick")
    (folder / "few.py").write_text(FEW)
    traced = df.trace(demo.model(), demo.task().example())
    own = traced.network.activations
    entries = [  # the number of removed activations: measuring importances takes a minute
        Score(span=block, samples=(-float(len(own & set(range(block.i + 1, block.j)))),))
        for block in traced.flagged_spans()
    ]
    table = df.ImportanceTable(fingerprint=traced.network.fingerprint, entries=tuple(entries))
    (folder / "importance.json").write_text(table.dumps())
    given = {"importance": str(folder / "importance.json"), "data": f"{folder / 'few.py'}:task"}

    def settings(run, **changes) -> Settings:
        changes = {"target": "cost_model", "export": ("model.pt2",)} | given | changes
        settings = replace(demo_settings(run), **changes)
        return replace(settings, recipe=dict(settings.recipe) | {"steps": 2, "batch": 8, "warmup": 0})

    return settings


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick):
    """Return the run of a demo with a budget of 80%, and what the command prints."""
    run = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch, without_memory():
        patch.setattr(demo, "demo_settings", lambda run: quick(run, budget="80%"))
        done = depthfold("demo", "--run", run)
    assert done.exit_code == 0, done.output
    return run, done.output


def test_the_demo_writes_all_results(finished):
    run, output = finished
    findings = Findings.loads((run / "findings.json").read_text())
    assert findings.after.latency <= 0.8 * findings.before.latency
    for name in ("report.html", "result/config.json", "model.pt2", "config.toml"):
        assert (run / name).exists(), name
    assert "The demo continues with" not in output


def test_the_command_prints_a_table_and_the_paths_of_the_results(finished):
    _, output = finished
    for text in ("Run the same command again to resume.", "before", "after", "x as fast", "accuracy, test", "points"):
        assert text in output
    last = [Path(line.strip()) for line in output.splitlines()[-3:]]
    assert [file.name for file in last] == ["report.html", "result", "model.pt2"]
    assert all(file.exists() for file in last)


def test_a_budget_that_cannot_be_met_is_replaced_by_one_that_can(tmp_path, quick, finished):
    run, said = shutil.copytree(finished[0], tmp_path / "run"), []  # with its latency table
    done = run_demo(quick(run, budget="3%", export=()), say=said.append)
    assert len(said) == 1
    assert said[0].startswith("No plan meets the budget of 3% (")
    assert "which this machine can meet" in said[0]
    share = done.findings.after.latency / done.findings.before.latency
    fastest = done.findings.frontier.points[0].latency / done.findings.before.latency
    assert fastest * 0.999 <= share <= float(reachable_budget(fastest).rstrip("%")) / 100 + 0.01


def test_a_resumed_demo_uses_the_same_budget(tmp_path, monkeypatch, quick):
    """Latencies vary: another budget might be met now, and another plan be trained."""
    measured = iter((0.5, 0.6, 0.7))

    def compress_stage(session, network, *, budget):
        if budget in ("3%", "4%"):
            raise BudgetError("Out of reach.", fastest=next(measured))
        return budget

    monkeypatch.setattr("depthfold.demo.demo.compress_stage", compress_stage)
    said = []

    def taken(budget, **changes):
        settings = quick(tmp_path / "run", budget=budget, data=demo_settings("run").data, **changes)
        found = run_demo(settings, say=said.append)
        assert tomllib.loads((tmp_path / "run/config.toml").read_text())["budget"] == found
        return found

    assert [taken("3%"), taken("3%"), taken("80%"), taken("3%")] == ["53%", "53%", "80%", "53%"]
    before = (
        "This machine could not meet the budget of 3% before, so the demo continues with 53%. To try 3% again, "
        f"delete {tmp_path / 'run/fallback.json'}."
    )
    assert said == ["Out of reach. The demo continues with 53%, which this machine can meet.", before, before]
    assert taken("4%") == "63%"  # another budget is decided again
    assert taken("4%", target="cost_model:launch_us=1.0") == "73%"  # and so is another environment


def test_demo_gives_up_if_no_plan_is_faster(tmp_path, monkeypatch, quick):
    def compress_stage(session, network, *, budget):
        raise BudgetError("Out of reach.", fastest=0.985)

    monkeypatch.setattr("depthfold.demo.demo.compress_stage", compress_stage)
    with pytest.raises(BudgetError, match="Out of reach"):
        run_demo(quick(tmp_path / "run", budget="3%", data=demo_settings("run").data), say=pytest.fail)


def test_other_budget_errors_are_raised(tmp_path, quick):
    with pytest.raises(BudgetError, match="is not a number with a unit"):
        run_demo(quick(tmp_path / "run", budget="soon"), say=pytest.fail)


def test_the_reachable_budget_includes_the_margin_and_noise():
    assert reachable_budget(0.5) == "53%"
