"""The result of compress() prints as one line."""

from pathlib import Path

import pytest
from torch import nn

from depthfold.pipeline import Compressed
from depthfold.reporting import Evaluation
from runs import loaded_run, made_up_run, measured_run


def shown(findings):
    return repr(Compressed(shallow=nn.Identity(), plan=findings.plan, findings=findings, folder=Path("runs/one")))


def test_result_prints_as_one_line():
    findings = measured_run()
    depth, segments = findings.network.depth, len(findings.plan.plan.cuts) + 1
    assert shown(findings) == (
        "Compressed(latency 20 ms -> 12.5 ms (1.60x as fast), top-1 accuracy 72.00% -> 70.50%, "
        f"{depth} traced convolutions -> {segments}, folder='runs/one')"
    )


@pytest.mark.parametrize("given", [{}, {"score_after": Evaluation(score=0.5)}])
def test_missing_measurements_are_left_out(given):
    assert shown(made_up_run(**given)).startswith("Compressed(50 traced convolutions -> ")


def test_score_that_is_not_a_share():
    scores = {name: Evaluation(score=score, metric="score", share=False) for name, score in
              (("score_before", 31.25), ("score_after", -4.5))}  # fmt: skip
    assert "score 31.25 -> -4.5, " in shown(measured_run(**scores))


def test_unreliable_speedup_is_marked_in_text_and_html():
    findings = loaded_run()
    done = Compressed(shallow=nn.Identity(), plan=findings.plan, findings=findings, folder=Path("runs/one"))
    assert "(1.60x as fast, unreliable)" in repr(done)
    assert (
        "<p>Unreliable: the original took 12 to 31 ms; something else was probably running.</p>" in done._repr_html_()
    )
