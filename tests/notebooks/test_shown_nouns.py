"""What a notebook shows for each data type: a short HTML table with the rows of the printed one."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.core import FlaggedSpan, Network, Refusal, Score, Timing
from depthfold.pipeline import Compressed
from runs import dropping_run, made_up_run, measured_run
from structures import chain, vgg19

EVIL = "</td><script>alert(1)</script>&amp;"
RUN = measured_run()


def cells(shown):
    """The text of every cell, row by row. The HTML is also well-formed XML."""
    return [tuple(cell.text or "" for cell in row) for row in ElementTree.fromstring(shown._repr_html_()).iter("tr")]


def lines(shown):
    return [paragraph.text for paragraph in ElementTree.fromstring(shown._repr_html_()).iter("p")]


def compressed(findings, tmp_path):
    return Compressed(shallow=nn.Identity(), plan=findings.plan, findings=findings, folder=tmp_path)


def traced():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))
    return df.trace(model, torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize(
    "shown",
    [RUN.network, traced(), RUN.latency, RUN.importance, RUN.frontier, RUN.plan, RUN.before, RUN, dropping_run()],
    ids=lambda shown: type(shown).__name__,
)
def test_every_noun_is_shown_as_a_short_table_without_scripts_and_colours(shown):
    html = shown._repr_html_()
    assert 2 <= len(cells(shown)) <= 21
    assert len({len(row) for row in cells(shown)}) == 1
    assert not re.search(r"<script|<style|<link|<img|https?:|color|background|\son\w+=", html)


@pytest.mark.parametrize("shown", [vgg19(), RUN.plan, RUN.before, traced()], ids=lambda shown: type(shown).__name__)
def test_rows_are_those_of_the_printed_table(shown):
    printed = [re.split(r"  +", line.strip()) for line in str(shown).splitlines()]
    for row in cells(shown):
        assert [cell for cell in row if cell] in printed
    for line in lines(shown):
        assert line.startswith("...") or line in [text.strip() for text in str(shown).splitlines()]


def test_frontier_shows_the_printed_plans_and_counts_the_others():
    printed = [line.split() for line in str(RUN.frontier).splitlines()]
    rows = cells(RUN.frontier)
    assert [list(row) for row in rows[1:]] == printed[-20:]
    assert lines(RUN.frontier)[-1] == f"... {len(RUN.frontier) - 20} more"
    small = dataclasses.replace(RUN.frontier, points=RUN.frontier.points[:5])
    assert len(cells(small)) == 6 and "more" not in small._repr_html_()


def test_tables_show_units_values_and_reasons():
    latency = df.LatencyTable(
        network="net",
        entries=(
            Timing(span=df.Span(0, 1), times=(1.25, 1.5), stdev=0.031),
            Timing(span=df.Span(1, 2), reason="out of memory"),
        ),
    )
    assert cells(latency) == [
        ("span", "ms", "ms without an activation at j", "standard deviation, ms", "reason for no time"),
        ("(0, 1]", "1.5", "1.25", "0.031", ""),
        ("(1, 2]", "", "", "", "out of memory"),
    ]
    assert lines(latency) == [str(latency)]
    importance = df.ImportanceTable(
        base=70.0,
        entries=(
            Score(span=FlaggedSpan(0, 1, True, True), samples=(69.0, 70.5)),
            Score(span=FlaggedSpan(0, 2, True, False), reason="the loss is NaN"),
        ),
    )
    assert cells(importance) == [
        ("block", "importance (change of the score)", "score", "samples", "reason for no score"),
        ("(0, 1], flags 11", "-0.25", "69.75", "2", ""),
        ("(0, 2], flags 10", "", "", "0", "the loss is NaN"),
    ]


def test_dropped_layers_are_named():
    run = dropping_run()
    assert any(" as " in entry.name for entry in run.latency.entries)
    dropping = dataclasses.replace(run.importance, entries=tuple(e for e in run.importance.entries if e.dropped)[:5])
    assert [row[0] for row in cells(dropping)[1:]] == [entry.name for entry in dropping.entries]
    assert cells(run.frontier)[0][-1] == "dropped layers"
    assert cells(RUN.frontier)[0][-1] == "ms by A"


def test_findings_and_the_result_of_compress_compare_before_and_after(tmp_path):
    expected = [
        ("", "before", "after", "change"),
        ("latency", "20 ms", "12.5 ms", "1.60x as fast"),
        ("interquartile range, ms", "{:.4g} to {:.4g}".format(*RUN.before.spread),
         "{:.4g} to {:.4g}".format(*RUN.after.spread), ""),
        ("top-1 accuracy, test set", "72.00% ± 0.45", "70.50% ± 0.46", "-1.50 points"),
        ("traced convolutions", "50", str(len(RUN.plan.segments)), ""),
    ]  # fmt: skip
    assert cells(RUN) == cells(compressed(RUN, tmp_path)) == expected
    assert lines(compressed(RUN, tmp_path)) == [RUN.title, f"folder: {tmp_path}"]
    run = dropping_run()
    assert cells(run)[-1] == ("traced convolutions", "50", str(run.plan.convolutions), "")
    assert run.plan.convolutions < len(run.plan.segments)


def test_names_from_models_are_escaped():
    network = chain(3, 3)
    layers = tuple(dataclasses.replace(layer, where=EVIL) for layer in network.layers)
    named = dataclasses.replace(network, name=EVIL, layers=layers, refusals=(Refusal(EVIL, EVIL, EVIL),))
    findings = made_up_run(named, title=EVIL)
    for shown in (named, findings, findings.latency, findings.frontier):
        assert "<script" not in shown._repr_html_()
    assert cells(named)[1][1] == EVIL
    assert lines(findings) == [EVIL]


def test_network_without_layers_shows_the_reason():
    empty = Network(name="net", layers=(), refusals=(Refusal("pool", "pooling", "pooling is not a convolution"),))
    assert cells(empty) == []
    assert lines(empty)[0].startswith("net: nothing to merge")
    assert "pooling is not a convolution" in lines(empty)[-1]
