"""The commands of experiments/equal_latency, and what they measure."""

import sys

import pytest

from experiments.equal_latency import __main__ as all_comparisons
from experiments.equal_latency import compare, merging_steps
from experiments.equal_latency.page.text import SECTIONS


def test_all_comparisons_are_commands_that_the_scripts_take(monkeypatch, tmp_path):
    import subprocess

    called = []

    def run(command, **_):
        module, arguments = command[2], command[3:]
        scripts = {script.__name__: script for script in (compare, merging_steps)}
        monkeypatch.setattr(sys, "argv", command[2:])
        scripts[module]._arguments()
        called.append((module.rpartition(".")[2], *arguments))
        return subprocess.CompletedProcess(command, returncode=0)

    monkeypatch.setattr(all_comparisons.subprocess, "run", run)
    arm = tmp_path / "efficientnet_lite0-on-onnxruntime"
    arm.mkdir()
    (arm / "results.jsonl").write_text('{"key": "latency"}\n')
    (arm / "channels-magnitude.json").write_text("{}")
    (tmp_path / "efficientnet_lite0").mkdir()
    (tmp_path / "efficientnet_lite0" / "channels-Taylor-steps.pt").write_text("steps")
    arguments = [str(tmp_path), "--cifar10", "c", "--imagenette", "i", "--only", *SECTIONS, "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["all_comparisons.py", *arguments])
    all_comparisons.main()
    by_folder = {
        name: [call[1:2] for call in called if str(tmp_path / name) in call and call[0] == "compare"]
        for name in SECTIONS
    }
    usual = [("train",), ("pick",), ("train",), ("train",), ("train",), ("profile",)]
    assert by_folder["resnet56"] == by_folder["efficientnet_lite0-on-float16"] == usual
    assert by_folder[arm.name] == [("train",), ("prune",), ("train",), ("train",), ("train",), ("train",)]
    assert all(call[call.index("--seeds") + 1] == "2" for call in called if str(arm) in call)
    assert [arm.name in str(call) for call in called if "for 180 epochs" in call] == [True]
    assert sum("channels, Taylor" in call for call in called if str(arm) in call) == 0  # none was picked
    assert (arm / "channels-Taylor-steps.pt").read_text() == "steps", "they are taken once for all targets"
    assert sum("without distillation" in call for call in called) == 1
    assert all("--steps" in call for call in called if call[0] == "compare")

    called.clear()
    monkeypatch.setattr(sys, "argv", ["all_comparisons.py", *arguments, "--seconds", "10"])
    with pytest.raises(SystemExit, match="Not everything was measured"):
        all_comparisons.main()
    assert not called


def test_number_of_seeds_can_be_given():
    from types import SimpleNamespace

    class Methods:
        def solved(self, share):
            yield f"search {share}"

        def original(self):
            yield "original"

        def others(self, share):
            yield f"rival {share}"

        def published(self):
            yield "pattern"

    def seeds(given, variant=""):
        options = SimpleNamespace(seeds=given, variant=variant, plain_sum=False)
        experiment = SimpleNamespace(options=options, subject=compare.SUBJECTS["efficientnet_lite0"])
        order = list(compare.Experiment.order(experiment, Methods()))
        return [[seed for found, seed in order if found == name] for name in ("search 0.5", "rival 0.5")]

    assert seeds(None) == [[0], [0]]
    assert seeds(2) == [[0, 1], [0]]
    assert seeds(3) == [[0, 1, 2], [0, 1, 2]]
    assert seeds(3, variant="without features") == [[0], [0]]


def test_patterns_come_with_our_plans_that_are_as_fast():
    from argparse import Namespace

    from experiments.equal_latency.candidates import PUBLISHED, SEARCHES, Methods
    from experiments.equal_latency.results import RESULTS
    from experiments.subjects import SUBJECTS

    subject = SUBJECTS["mobilenet_v2_1.4"]
    model = subject.build()
    options = Namespace(
        run=RESULTS / subject.name, device="cpu", plain_sum=False, what="profile", methods=[PUBLISHED, *SEARCHES]
    )
    methods = Methods(subject, model, subject.trace(model), None, None, 1, options)
    *_, pattern, paper, moves = methods.published()
    assert [one.method for one in (pattern, paper, moves)] == [PUBLISHED, "paper", "all moves"]
    assert {one.at for one in (pattern, paper, moves)} == {"DS-F-1.4"}
    assert max(paper.predicted, moves.predicted) <= pattern.predicted
    assert moves.plan.dropped and not paper.plan.dropped
