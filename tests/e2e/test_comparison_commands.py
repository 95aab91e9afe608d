"""The commands of experiments/all_comparisons.py, and what they measure."""

import sys
from pathlib import Path

import pytest


def test_all_comparisons_are_commands_that_the_scripts_take(results_page, monkeypatch, tmp_path):
    import subprocess

    import all_comparisons
    import equal_latency
    import merging_steps
    from results_text import SECTIONS

    called = []

    def run(command, **_):
        script, arguments = Path(command[1]), command[2:]
        monkeypatch.setattr(sys, "argv", command[1:])
        {"equal_latency.py": equal_latency, "merging_steps.py": merging_steps}[script.name]._arguments()
        assert script.exists()
        called.append((script.stem, *arguments))
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
        name: [call[1:2] for call in called if str(tmp_path / name) in call and call[0] == "equal_latency"]
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
    assert all("--steps" in call for call in called if call[0] == "equal_latency")

    called.clear()
    monkeypatch.setattr(sys, "argv", ["all_comparisons.py", *arguments, "--seconds", "10"])
    with pytest.raises(SystemExit, match="Not everything was measured"):
        all_comparisons.main()
    assert not called


def test_number_of_seeds_can_be_given(results_page):
    from types import SimpleNamespace

    import equal_latency

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
        experiment = SimpleNamespace(options=options, subject=equal_latency.SUBJECTS["efficientnet_lite0"])
        order = list(equal_latency.Experiment.order(experiment, Methods()))
        return [[seed for found, seed in order if found == name] for name in ("search 0.5", "rival 0.5")]

    assert seeds(None) == [[0], [0]]
    assert seeds(2) == [[0, 1], [0]]
    assert seeds(3) == [[0, 1, 2], [0, 1, 2]]
    assert seeds(3, variant="without features") == [[0], [0]]
