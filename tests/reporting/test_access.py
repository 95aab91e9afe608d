"""The page for every reader: axe-core finds nothing, units and words stay on one line, unchanged layers are folded."""

import dataclasses

import pytest

from depthfold.core import Calibration
from depthfold.reporting import Int8File, report
from lacking import needs
from runs import brute_force_states, dropping_run, measured_run
from structures import Builder

pytestmark = needs("playwright", "chromium", "axe_playwright_python")

TITLE = "torchvision:mobilenet_v2 at 65% on onnxruntime:threads=2,providers=CPUExecutionProvider"
CALIBRATION = Calibration(
    slope=1.0, per_segment=-0.1, per_read=0.0, per_write=0.0, outside=0.3, networks=9, median_error=0.01,
    worst_error=0.02,
)  # fmt: skip
INT8 = Int8File(
    name="model-int8.onnx", split="test", score=91.12, float32_score=91.18, latency=0.35, float32_latency=0.7
)


def small_network():
    """Return three residuals of two layers and a strided layer, so that plans merge, drop layers and drop branches."""
    build = Builder(8, 16)
    for _ in range(3):
        source = build.position
        build.add(8)
        build.add(8)
        build.skip(source)
    build.add(16, stride=2)
    return build.network("residuals")


def with_everything(findings):
    """Return the findings with a long title, a quantity, and times at the floor of the calibration."""
    entries = tuple(
        dataclasses.replace(entry, floored=(False, True)) if entry.times and entry.span.i == 4 else entry
        for entry in findings.latency.entries
    )
    return dataclasses.replace(
        findings,
        title=TITLE,
        int8=(INT8,),
        latency=dataclasses.replace(findings.latency, entries=entries, calibration=CALIBRATION),
        importance=dataclasses.replace(findings.importance, quantity="accuracy, in points"),
        frontier=dataclasses.replace(findings.frontier, quantity="accuracy, in points"),
    )


# Open everything. Of the rows of a long table and the labels of an axis, two are enough: axe takes milliseconds for
# each.
OPEN_SHORT = """() => {
  document.querySelectorAll("details").forEach(part => { part.open = true; });
  const more = document.querySelectorAll("details tbody tr:nth-child(n + 3), .ticks span:nth-child(n + 3)");
  more.forEach(one => one.remove());
}"""


@pytest.fixture(scope="module")
def small(browser, tmp_path_factory):
    """A small page with everything that a page can show, opened at a plan that shows every kind of mark."""
    dropping, measured = dropping_run(small_network()), measured_run()
    names = ("before", "after", "score_before", "score_after", "verification", "environment", "versions", "training")
    findings = dataclasses.replace(dropping, **{name: getattr(measured, name) for name in names})
    path = report(with_everything(findings), tmp_path_factory.mktemp("small") / "report.html")
    page = browser.new_context().new_page()
    page.goto(path.as_uri())
    for number in range(int(page.get_attribute("#budget", "max")) + 1):
        page.locator("#budget").fill(str(number))
        if all(page.locator(f"#blocks .merged {mark}").count() for mark in (".removed", ".dropped s")):
            break
    else:
        pytest.fail("no plan both merges and drops layers in one block")
    page.evaluate(OPEN_SHORT)
    return page


@pytest.fixture(scope="module")
def findings():
    return with_everything(measured_run())


@pytest.fixture(scope="module")
def phone(browser, findings, tmp_path_factory):
    """The page of a MobileNetV2 on a phone."""
    path = report(findings, tmp_path_factory.mktemp("large") / "report.html")
    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("#blocks > li")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_violation(small, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    small.set_viewport_size({"width": width, "height": 844})
    small.emulate_media(color_scheme=scheme)
    found = Axe().run(small).response
    checked = {rule["id"] for rule in found["passes"]}
    assert checked >= {"color-contrast", "th-has-data-cells", "label", "button-name", "list"}
    assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found["violations"]] == []


# The texts that match a pattern and are drawn on more than one line, outside of elements that are not drawn.
BROKEN = r"""pattern => {
  document.querySelectorAll("details").forEach(part => { part.open = true; });
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  const found = { matches: 0, broken: [] };
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    if (node.parentElement.closest("script, noscript, .unseen") || !node.parentElement.checkVisibility()) continue;
    for (const match of node.data.matchAll(new RegExp(pattern, "gu"))) {
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      found.matches += 1;
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) found.broken.push(match[0]);
    }
  }
  return found;
}"""


UNITS = r"(±\s*)?\d[\d.,]*(e[-\u2212]\d+|\s*(ms|%|MB|[kMG]|points|images|steps)(?!\p{L}))"


WORDS = r"[\p{L}\p{N}]+"


@pytest.fixture(scope="module")
def broken(phone):
    """The broken texts by pattern, on phones of several widths: at a single one, a text may not break by chance."""
    broken = {UNITS: [], WORDS: []}
    for width in (330, 360, 390):
        phone.set_viewport_size({"width": width, "height": 844})
        for pattern, texts in broken.items():
            found = phone.evaluate(BROKEN, pattern)
            assert found["matches"] > 500
            texts += found["broken"]
        assert phone.evaluate("() => document.documentElement.scrollWidth") == width
    return broken


def test_units_stay_with_their_numbers_on_a_phone(broken):
    assert broken[UNITS] == []


def test_titles_do_not_break_inside_words_on_a_phone(phone, broken):
    """A name such as torchvision:mobilenet_v2 may break after its punctuation."""
    headings = phone.evaluate("() => [...document.querySelectorAll('h1, h2, h3, caption')].map(one => one.textContent)")
    assert TITLE in headings
    assert [word for word in broken[WORDS] if any(word in heading for heading in headings)] == []


def test_unchanged_layers_are_folded(phone, findings):
    phone.uncheck("#unchanged")
    phone.evaluate("() => document.getElementById('chosen').click()")
    states = brute_force_states(findings.network, findings.plan)
    same = {
        segment.span.j: len(segment.span) == 1 and states.get(segment.span.j) not in ("removed", "inserted")
        for segment in findings.plan.segments
    }
    shown = phone.eval_on_selector_all(
        "#blocks .block", "all => all.map(one => [Number(one.dataset.j), one.checkVisibility()])"
    )
    assert dict(shown) == {j: not is_same for j, is_same in same.items()}
    folds = phone.eval_on_selector_all("#blocks summary", "all => all.map(one => one.innerText.split(/\\s/))")
    ends = [words[1].split("\N{EN DASH}") for words in folds]
    assert [l for first, *last in ends for l in range(int(first), int((last or [first])[0]) + 1)] == [
        j for j, is_same in same.items() if is_same
    ]
    phone.check("#unchanged")
    assert phone.eval_on_selector_all("#blocks .block", "all => all.every(one => one.checkVisibility())")


@pytest.fixture
def folded(browser, phone):
    """The page as it is opened: with everything folded."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.goto(phone.url)
    yield page
    page.context.close()


COMMAND = "#provenance pre"


def test_provenance_is_folded_except_for_notes(folded, findings):
    assert findings.notes
    assert all(folded.get_by_text(note).is_visible() for note in findings.notes)
    assert folded.locator("#provenance table").count() == 2
    for part in (COMMAND, "#provenance table", "#provenance details h3"):
        assert not any(one.is_visible() for one in folded.locator(part).all())


def test_keyboard_opens_the_provenance(folded, findings):
    folded.focus("#provenance summary")
    folded.keyboard.press("Enter")
    assert folded.locator(COMMAND).is_visible()
    assert folded.inner_text(COMMAND) == findings.command
    folded.keyboard.press("Enter")
    assert not folded.locator(COMMAND).is_visible()


def test_search_in_the_page_opens_the_provenance(folded):
    """A link to a text opens what is folded, as a search in the browser does."""
    path = folded.url
    folded.goto("about:blank")
    folded.goto(f"{path}#:~:text=compress%20%2D%2Dbudget")
    folded.wait_for_selector(COMMAND, state="visible", timeout=10_000)


def test_print_shows_the_provenance(folded):
    folded.emulate_media(media="print")
    assert folded.locator(COMMAND).is_visible()
    assert all(table.is_visible() for table in folded.locator("#provenance table").all())
    assert not folded.locator("#tables table").first.is_visible()


def test_most_accurate_plan_is_not_the_original(phone, findings):
    original = findings.frontier[-1]
    assert not any(len(segment.span) > 1 for segment in original.segments)
    phone.evaluate("() => document.getElementById('best').click()")
    text = phone.text_content("#summary").replace("\u202f", " ")
    best = findings.frontier[-2]
    assert f"{best.latency:.4g}" in text
    assert f"{len(best.segments)} after" in text


def test_times_at_the_floor_are_marked(phone, findings):
    plan = next(
        plan for plan in findings.frontier
        if any(s.span.i == 4 and s.span.j in plan.plan.activations for s in plan.segments)
    )  # fmt: skip
    phone.locator("#budget").fill(str(findings.frontier.plans.index(plan)))
    times = phone.eval_on_selector_all("#blocks .times p", "all => all.map(one => one.textContent)")
    floored = [s.span.i == 4 and s.span.j in plan.plan.activations for s in plan.segments]
    assert [text.endswith(" (floor)") for text in times] == floored
    cells = phone.eval_on_selector_all("#plot-latency .plot:first-child .cell", "all => all.map(one => one.style.fill)")
    absent = [entry.times is None or entry.floored[1] for entry in findings.latency.entries]
    assert [fill == "var(--absent)" for fill in cells] == absent


def test_training_curve_is_drawn(phone, findings):
    for plot, points in (
        ("1", [(point.step, point.loss) for point in findings.training]),
        ("2", [(point.step, point.score) for point in findings.training if point.score is not None]),
    ):
        texts = phone.eval_on_selector_all(
            f"#plot-training-{plot} .canvas .dot", "all => all.map(one => one.dataset.text)"
        )
        assert texts == [f"After step {step}: {value:.4g}" for step, value in points]
    assert phone.text_content("#plot-training-2 .title.left") == "Top-1 accuracy on the hold-out set, %"


def test_int8_files_are_beside_float32(phone):
    rows = phone.eval_on_selector_all(
        "tr", "all => all.map(one => [...one.cells].map(cell => cell.textContent).join('; '))"
    )
    shown = [row.replace("\u202f", " ").replace("\xa0", " ") for row in rows]
    assert "model-int8.onnx; 0.3500 ms; 0.7000 ms; 2.00\u00d7 as fast; 91.12; 91.18" in shown


def test_axis_says_what_importance_means(phone):
    for plot in ("frontier", "ablation"):
        title = phone.text_content(f"#plot-{plot} .title.left")
        assert title == "Importance: predicted change of accuracy, in points"
