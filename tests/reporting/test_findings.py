"""The findings: parts of different networks are refused, and the JSON round trip is exact."""

import dataclasses
import math

import pytest

from depthfold.errors import InvalidValue
from depthfold.reporting import Evaluation, Findings
from runs import loaded_run, made_up_run, measured_run
from structures import vgg19


def test_plan_without_latencies_is_refused():
    findings = measured_run()
    with pytest.raises(InvalidValue, match=r"must be a SolvedPlan, which has latencies, found a Plan\. Take one from"):
        dataclasses.replace(findings, plan=findings.plan.plan)


def test_findings_survive_a_json_round_trip():
    for findings in (made_up_run(), measured_run()):
        assert Findings.loads(findings.dumps()) == findings


def test_all_parts_of_another_network_are_named_in_one_error():
    with pytest.raises(InvalidValue) as caught:
        dataclasses.replace(made_up_run(), network=vgg19())
    text = str(caught.value)
    assert text.startswith("The findings 'A run' do not belong together: the network has 16 layers, the latency table")
    assert all(what in text for what in ("importance table 50", "frontier 50", "plan 50"))
    assert text.endswith("Give the tables, the frontier and the plan of one network.")


def test_a_table_with_the_fingerprint_of_another_network_is_refused():
    findings = made_up_run()
    other = dataclasses.replace(findings.latency, fingerprint="0123456789abcdef")
    with pytest.raises(InvalidValue, match=r"the latency table is of another network \(fingerprint 0123456789abcdef"):
        dataclasses.replace(findings, latency=other)


def test_missing_parts_are_named():
    assert made_up_run().missing == (
        "the end-to-end measurement of the original network",
        "the end-to-end measurement of the compressed network",
        "the score of the original network",
        "the score of the compressed network",
        "the verification of the merged network",
        "the training curve",
    )
    assert measured_run().missing == ()
    assert measured_run(verification=None).missing == ("the verification of the merged network",)


def test_predicted_latency_defaults_to_the_latency_of_the_plan():
    findings = made_up_run()
    assert findings.predicted_latency == findings.plan.latency
    assert dataclasses.replace(findings, predicted=7.5).predicted_latency == 7.5


def test_standard_error_is_that_of_counting_images():
    assert Evaluation(score=0.5, images=100).standard_error == pytest.approx(0.05)
    # Directly: 72 hits and 28 misses, their standard deviation over the root of their number.
    hits = [1] * 72 + [0] * 28
    mean = sum(hits) / 100
    direct = math.sqrt(sum((hit - mean) ** 2 for hit in hits) / 100) / 10
    assert Evaluation(score=0.72, images=100).standard_error == pytest.approx(direct)
    assert Evaluation(score=0.5).standard_error is None
    assert Evaluation(score=31.5, share=False, images=100).standard_error is None


def test_comparison_says_if_the_speedup_is_unreliable():
    quiet, loaded = measured_run().comparison(), loaded_run().comparison()
    assert quiet.rows[0][3] == "1.60x as fast" and quiet.notes == ()
    assert loaded.rows[0][3] == "1.60x as fast, unreliable"
    assert loaded.notes == ("Unreliable: the original took 12 to 31 ms; something else was probably running.",)
    assert made_up_run().speedup is None and made_up_run().comparison().notes == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(score=71.2), r"The accuracy of an evaluation must be a share between 0 and 1 \(or share=False\)"),
        (dict(score=math.nan, share=False), "The accuracy of an evaluation must be a finite number, found nan"),
        (dict(score=0.5, spread=-1.0), "The spread of an evaluation must be at least 0, found -1.0"),
        (dict(score=0.5, images=0), "An evaluation needs at least one image, found images=0"),
    ],
)  # fmt: skip
def test_invalid_evaluations_are_refused(fields, message):
    with pytest.raises(InvalidValue, match=message):
        Evaluation(**fields)
