"""Plans with dropped layers and branches on the page: the data, the static part and the explorer."""

import dataclasses
import json
import re
from itertools import pairwise

import pytest

from depthfold.core import Drops, FlaggedSpan, ImportanceTable, LatencyTable, Score, Span, Timing
from depthfold.core.latency_table import sum_times
from depthfold.reporting import Findings, figures, format, report, view
from depthfold.reporting.report import page
from depthfold.reporting.view import (
    explorer_data,
    scored_blocks,
    select_plans,
    timed_spans,
    unusable_blocks,
)
from depthfold.solver import solve
from lacking import needs
from runs import dropping_run, made_up_run
from structures import Builder, resnet34

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module", params=["MobileNetV2", "ResNet34"])
def findings(request):
    return dropping_run(resnet34() if request.param == "ResNet34" else None)


@pytest.fixture(scope="module")
def text(findings):
    return page(findings)


def missing_layers(plan):
    """Return the layers without a convolution, one by one."""
    dropped = plan.plan.dropped
    inside = [l for branch in dropped.branches for l in range(branch.i + 1, branch.j + 1)]
    return sorted({*dropped.layers, *inside})


def test_segments_with_the_same_span_and_other_drops_are_kept_apart(findings):
    plans = select_plans(findings.frontier, findings.plan, most=10**6)
    data = json.loads(json.dumps(explorer_data(findings, plans)))
    assert len({tuple(segment[:2]) for segment in data["segments"]}) < len(data["segments"])
    for shown, solved in zip(data["plans"], findings.frontier, strict=True):
        parts = [data["segments"][index] for index in shown["segments"]]
        times = [active if j in shown["activations"] else bare for _, j, active, bare, *_ in parts]
        assert sum_times(times) == shown["ms"] == solved.latency
        drops = [part[6] for part in parts if len(part) > 6]
        assert sorted(l for each in drops for l in each["layers"]) == list(solved.plan.dropped.layers)
        found = sorted(Span(*ends) for each in drops for ends in each["branches"])
        assert found == list(solved.plan.dropped.branches)
        missing = missing_layers(solved)
        for part, segment in zip(parts, solved.segments, strict=True):
            empty = all(l in missing for l in segment.span.layers)
            assert part[5] == (None if empty else format.shape(segment.shape))


def test_the_chosen_plan_is_found_by_its_drops_also():
    """Two plans with the same A and S differ in what they drop."""
    findings = dropping_run()
    twins = {}
    for n, point in enumerate(findings.frontier.points):
        twins.setdefault((point.activations, point.cuts), []).append(n)
    same = next(numbers for numbers in twins.values() if len(numbers) > 1)
    for n in same:
        assert select_plans(findings.frontier, findings.frontier[n], most=10**6).chosen == n


def test_static_page_says_what_is_dropped(findings, text):
    plan = findings.plan
    words = re.sub(r"\s+", " ", text)
    assert f"<td>{plan.plan.dropped}</td>" in text  # the table of results, and the row of the plan
    assert f'<p class="figure">{plan.convolutions}</p>' in text
    shown = select_plans(findings.frontier, findings.plan)
    dropping = sum(bool(point.dropped) for point in shown.points)
    assert f"{dropping} plans drop layers; the chosen one drops {plan.plan.dropped}." in words  # alternative text
    assert "Dropped layers are hatched." in words
    for point in shown.points:
        assert f"<td>{point.dropped}</td></tr>" in text
    assert len(set(findings.plan.segments)) == len(findings.plan.segments) > plan.convolutions


def test_tables_list_every_shape_and_every_option(findings, text):
    rows = text.split("<tr>")
    for entry in findings.latency.entries:
        shape = format.shape(entry.shape) if entry.shape else "all layers"
        assert any(f'"row">{entry.span}</th>' in row and f"<td>{shape}</td>" in row for row in rows)
    shapes = sum(entry.shape is not None for entry in findings.latency.entries)
    assert f"{shapes} entries of these are for spans with dropped layers." in text
    options = sum(bool(entry.dropped) for entry in findings.importance.entries)
    assert f"{options} entries of these are for blocks with dropped layers." in text
    for entry in findings.importance.entries:
        assert f"<td>{entry.dropped}</td>" in text


def test_maps_have_the_best_of_the_options(findings):
    timed, scored = timed_spans(findings), scored_blocks(findings)
    first, *_, last = figures.latency_maps(findings.network, timed)
    assert {cell.span: cell.value for cell in first.cells} == {s: both[1] for s, both in findings.latency.times.items()}
    least = {}
    for entry in findings.latency.entries:
        if entry.shape is not None:
            least[entry.span] = min(entry.times[1], least.get(entry.span, 1e9))
    assert {cell.span: cell.value for cell in last.cells} == least
    maps = {each.title: each for each in figures.importance_maps(findings.network, scored)}
    best = {}
    for (block, dropped), value in findings.importance.options.items():
        if dropped and block.a and block.b:
            best[block.span] = max(value, best.get(block.span, -1e9))
    cells = maps["an activation at both ends, the best with dropped layers"].cells
    assert {cell.span: cell.value for cell in cells} == best
    assert all("\nwithout " in cell.text for cell in cells)
    whole = maps["an activation at both ends"].cells
    assert {c.span: c.value for c in whole} == {
        b.span: v for b, v in findings.importance.importances.items() if b.a and b.b
    }


def test_entries_without_a_number_are_named_with_what_they_drop():
    findings = dropping_run(resnet34())
    entry = next(entry for entry in findings.latency.entries if entry.shape is not None)
    score = next(entry for entry in findings.importance.entries if entry.dropped)
    latency, importance = (
        dataclasses.replace(table, entries=tuple(new if each == old else each for each in table.entries))
        for table, old, new in (
            (findings.latency, entry, dataclasses.replace(entry, times=None, reason="out of memory")),
            (findings.importance, score, dataclasses.replace(score, samples=(), reason="the loss is NaN")),
        )
    )
    changed = dataclasses.replace(findings, latency=latency, importance=importance)
    assert unusable_blocks(timed_spans(changed), scored_blocks(changed)) == [
        ("no time", "out of memory", f"{entry.span} as {format.shape(entry.shape)}"),
        ("no score", "the loss is NaN", f"{score.span} without {score.dropped}"),
    ]


def test_page_without_drops_does_not_mention_them():
    text = page(made_up_run())
    shown = text[: text.index("<script>")]
    assert "ropped" not in shown[shown.index("<body>") :]


def test_of_a_long_table_the_page_lists_the_entries_that_its_plans_use(findings, monkeypatch):
    monkeypatch.setattr(view, "MOST_ROWS", 100)
    plans, timed, scored = (
        select_plans(findings.frontier, findings.plan),
        timed_spans(findings),
        scored_blocks(findings),
    )
    latencies = {point.latency for point in plans.points}
    shown = [plan for plan in findings.frontier if plan.latency in latencies]
    listed = view.listed_times(findings, plans, timed)
    for plan in shown:
        times = {(entry.span, entry.bare, entry.time) for entry in listed}
        assert all(segment.empty or (segment.span, *segment.times) in times for segment in plan.segments)
    assert len(listed) < len(timed)
    scores = {(entry.block, entry.dropped): entry.importance for entry in view.listed_scores(findings, plans, scored)}
    assert len(scores) < len(scored)
    for plan in shown:
        ends = (0, *plan.boundaries, findings.network.depth)
        blocks = [FlaggedSpan(i, j, i == 0 or i in plan.plan.activations, j in plan.plan.activations)
                  for i, j in pairwise(ends)]  # fmt: skip
        total = sum(scores[block, plan.plan.dropped.within(block.span)] for block in blocks)
        assert total == pytest.approx(plan.importance)
    text = page(findings)
    assert f"The table has {len(timed):,} entries. These are the {len(listed)} that a plan on this page uses" in text


@pytest.fixture(scope="module")
def opened(browser, findings, tmp_path_factory):
    """The page on a phone, with the errors that it reports."""
    path = report(findings, tmp_path_factory.mktemp("report") / "report.html")
    tab, errors = browser.new_context(viewport=PHONE).new_page(), []
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(path.as_uri())
    tab.wait_for_selector("#blocks > li")
    return tab, errors


READ = """() => [...document.querySelectorAll("#blocks .block")].map(item => ({
    dropped: [...item.querySelectorAll(".layer")].flatMap((layer, n) =>
        [...layer.querySelectorAll(".dropped:has(s)")].map(part => [Number(item.dataset.i) + n + 1, part.textContent])),
    left: [...item.querySelectorAll(".aside")].map(part => part.textContent).filter(text => text.startsWith("only")),
    becomes: item.querySelector(".becomes p").textContent,
    visible: item.offsetParent !== null,
}))"""


@needs("playwright", "chromium")
def test_explorer_shows_dropped_layers_and_branches(opened, findings):
    tab, errors = opened
    shown = select_plans(findings.frontier, findings.plan).points
    for n in (0, len(shown) // 4, len(shown) // 2, len(shown) - 1):
        tab.locator("#budget").fill(str(n))
        plan = next(each for each in findings.frontier if each.latency == shown[n].latency)
        blocks, missing = tab.evaluate(READ), missing_layers(plan)
        assert [l for block in blocks for l, _ in block["dropped"]] == missing
        for block in blocks:
            for l, words in block["dropped"]:
                alone = l in plan.plan.dropped.layers
                assert words.endswith(" dropped" if alone else " dropped with its branch")
        left = [text for block in blocks for text in block["left"]]
        assert left == [f"only the skip from {branch.i} is left" for branch in plan.plan.dropped.branches]
        for block, segment in zip(blocks, plan.segments, strict=True):
            if set(segment.span.layers) <= set(missing):
                active = segment.span.j in plan.plan.activations
                assert block["becomes"] == f"→ {'only an activation' if active else 'nothing'}, no convolution"
            elif len(segment.span) > 1:
                assert block["becomes"] == f"→ one {format.shape(segment.shape)}"
            else:
                assert block["becomes"] == "not merged"
        text = tab.text_content("#summary")
        assert f"before, {plan.convolutions} after" in text
        assert (f"Dropped: {len(missing)} layer" in text) == bool(missing)
        hatched = tab.eval_on_selector_all("#strip-before > i", "all => all.map(one => one.className === 'dropped')")
        assert [l for l, here in enumerate(hatched, start=1) if here] == missing
    assert errors == []


@needs("playwright", "chromium")
def test_blocks_with_drops_are_not_folded(opened, findings):
    tab, _ = opened
    tab.evaluate("() => document.getElementById('chosen').click()")
    assert all(block["visible"] for block in tab.evaluate(READ) if block["dropped"])


@needs("playwright", "chromium")
def test_dropped_layers_fit_on_a_phone(opened):
    tab, _ = opened
    tab.evaluate("() => document.querySelectorAll('details').forEach(part => part.open = true)")
    assert tab.evaluate("() => document.documentElement.scrollWidth") == PHONE["width"]


@needs("playwright", "chromium")
def test_plan_that_takes_no_time_has_no_speedup(browser, tmp_path):
    """The only residual covers the whole network and is dropped."""
    builder = Builder(4, size=8)
    for _ in range(2):
        builder.add(4, activation=None)
    builder.skip(0)
    network, block = builder.network("tiny"), FlaggedSpan(0, 2, True, False)
    times = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 1.5}
    empty = network.merged_shape(Span(0, 2), Drops(branches=[Span(0, 2)]))
    entries = [Timing(span=Span(*ends), times=(time, time)) for ends, time in times.items()]
    latency = LatencyTable(entries=[*entries, Timing(span=Span(0, 2), times=(0.0, 0.0), shape=empty)])
    scores = [Score(span=FlaggedSpan(0, 1, True, False), samples=(0.0,)), Score(span=block, samples=(-0.1,)),
              Score(span=FlaggedSpan(1, 2, False, False), samples=(0.0,)),
              Score(span=block, samples=(-1.0,), dropped=Drops(branches=[Span(0, 2)]))]  # fmt: skip
    importance = ImportanceTable(entries=scores)
    frontier = solve(latency, importance, network=network)
    assert frontier[0].latency == 0 and frontier[0].original == 2.0
    findings = Findings(title="No time", network=network, latency=latency, importance=importance, frontier=frontier,
                        plan=frontier[1])  # fmt: skip
    tab = browser.new_page()
    tab.goto(report(findings, tmp_path / "report.html").as_uri())
    texts = []
    for button in ("#chosen", "#fastest"):
        tab.click(button)
        texts.append(tab.text_content("#summary"))
    assert "1.33 times as fast as the original" in texts[0]
    assert "0 ms predicted, importance" in texts[1].replace("\u202f", " ")
    tab.close()
