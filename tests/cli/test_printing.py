"""The summary that compress prints."""

from pathlib import Path

from torch import nn

from depthfold.cli.printing import print_summary
from depthfold.pipeline import Compressed
from runs import loaded_run, measured_run


def summary(findings, capsys):
    print_summary(Compressed(shallow=nn.Identity(), plan=findings.plan, findings=findings, folder=Path("my run")), ())
    return " ".join(capsys.readouterr().out.split())


def test_unreliable_speedup_is_printed_with_its_reason_and_the_command_that_measures_again(capsys):
    shown = summary(loaded_run(), capsys)
    assert "1.60x as fast, unreliable" in shown
    assert "Unreliable: the original took 12 to 31 ms; something else was probably running. When the machine" in shown
    assert "When the machine is quiet, run: depthfold profile --run 'my run'" in shown


def test_reliable_speedup_is_printed_without_a_remark(capsys):
    shown = summary(measured_run(), capsys)
    assert "1.60x as fast" in shown and "nreliable" not in shown
