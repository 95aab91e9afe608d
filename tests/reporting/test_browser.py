"""The page in a real browser: explorer, figures, themes and keyboard work, and the page makes no request."""

from dataclasses import replace

import pytest

from depthfold.reporting import figures, format, report
from depthfold.reporting.view import select_plans
from lacking import needs
from runs import brute_force_states, measured_run

pytestmark = needs("playwright", "chromium")

LAPTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def findings():
    run = measured_run()
    first = replace(run.network.layers[0], where=EVIL)
    network = replace(run.network, layers=(first, *run.network.layers[1:]))
    return replace(run, network=network, title=f"{EVIL} and more")


@pytest.fixture(scope="module")
def path(findings, tmp_path_factory):
    return report(findings, tmp_path_factory.mktemp("report") / "report.html")


class Watched:
    """A page, its requests, and its console messages and errors."""

    def __init__(self, browser, url, **options):
        self.page, self.requests, self.errors = browser.new_context(**options).new_page(), [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss()))
        self.page.goto(url)
        self.page.wait_for_selector("#blocks > li")


@pytest.fixture(scope="module")
def on_laptop(browser, path):
    return Watched(browser, path.as_uri(), viewport=LAPTOP)


@pytest.fixture(scope="module")
def on_phone(browser, path):
    return Watched(browser, path.as_uri(), viewport=PHONE, is_mobile=True, has_touch=True)


def watched_page(watched, path):
    """Yield the page in its first state; after the test, check that there was no error and no request."""
    watched.page.emulate_media(color_scheme="light")
    watched.page.evaluate("() => document.documentElement.removeAttribute('data-theme')")
    watched.page.uncheck("#unchanged")
    watched.page.evaluate("() => document.getElementById('chosen').click()")
    yield watched.page
    assert [url for url in watched.requests if not url.startswith("data:")] == [path.as_uri()]
    assert watched.errors == []


@pytest.fixture
def laptop(on_laptop, path):
    yield from watched_page(on_laptop, path)


@pytest.fixture
def phone(on_phone, path):
    yield from watched_page(on_phone, path)


def network_on(page):
    """Return the spans of the blocks, the state of the activation of each layer, and the merged shapes."""
    spans, states, shapes = [], {}, {}
    for block in page.evaluate(
        """() => [...document.querySelectorAll("#blocks .block")].map(item => ({
            span: [Number(item.dataset.i), Number(item.dataset.j)],
            marks: [...item.querySelectorAll(".layer")]
                .map(layer => layer.querySelector(".mark")?.classList[1] ?? null),
            shape: item.querySelector(".becomes strong")?.textContent ?? null,
        }))"""
    ):
        i, j = block["span"]
        spans.append((i, j))
        assert len(block["marks"]) == j - i
        states |= {l: mark for l, mark in enumerate(block["marks"], start=i + 1) if mark}
        shapes[i, j] = block["shape"]
    return spans, states, shapes


def times_on(page):
    """Return the times of the blocks from their texts, such as "2.10 → 0.729 ms" or "0.459 ms"."""
    texts = page.eval_on_selector_all("#blocks .times p", "all => all.map(one => one.textContent)")
    return [text.removeprefix("Time ").split("→")[-1].strip() for text in texts]


def check_shown(page, findings, plan):
    spans, states, shapes = network_on(page)
    assert spans == [(segment.span.i, segment.span.j) for segment in plan.segments]
    assert states == brute_force_states(findings.network, plan)
    for segment in plan.segments:
        merged = format.shape(findings.network.merged_shape(segment.span)) if len(segment.span) > 1 else None
        assert shapes[segment.span.i, segment.span.j] == merged
    times = [segment.times[segment.span.j in plan.plan.activations] for segment in plan.segments]
    shown = [float(time.removesuffix("\u202fms")) for time in times_on(page)]
    assert shown == pytest.approx(times, rel=6e-3)
    used = {segment.span: segment for other in findings.frontier for segment in other.segments}
    longest = max(time for s in used.values() for time in (*s.times, s.replaced or 0.0))
    bars = page.eval_on_selector_all("#blocks .bars .after", "all => all.map(one => parseFloat(one.style.width))")
    assert bars == pytest.approx([100 * time / longest for time in times], rel=1e-3)
    text = page.text_content("#summary")
    counts = [list(states.values()).count(state) for state in ("removed", "inserted")]
    assert f"{format.ms(plan.latency)} predicted" in text
    merged = sum(len(segment.span) > 1 for segment in plan.segments)
    assert f"{findings.network.depth} before, {len(plan.segments)} after, of which {merged} merged." in text
    assert f"{len(findings.network.activations)} before, of which {counts[0]} removed; {counts[1]} inserted." in text
    spoken = page.get_attribute("#budget", "aria-valuetext")
    assert spoken.startswith(f"{format.ms(plan.latency)}, ")
    assert spoken.endswith("of the original")
    figure = figures.frontier_figure(findings, select_plans(findings.frontier, findings.plan))
    selected = [float(page.get_attribute("#selected", name).rstrip("%")) for name in ("cx", "cy")]
    assert selected == [figure.x.place(plan.latency), pytest.approx(100 - figure.y.place(plan.importance))]


def test_page_opens_at_the_chosen_plan(laptop, findings):
    check_shown(laptop, findings, findings.plan)
    assert "The chosen plan" in laptop.text_content("#summary")


def test_slider_selects_the_plans_of_the_frontier(laptop, findings):
    assert laptop.get_attribute("#budget", "max") == str(len(findings.frontier) - 1)
    for n in (0, 1, len(findings.frontier) // 3, len(findings.frontier) - 1):
        laptop.locator("#budget").fill(str(n))  # sets the value and fires the input event
        check_shown(laptop, findings, findings.frontier[n])


def test_keyboard_moves_the_slider(laptop, findings):
    at = findings.frontier.points.index(next(p for p in findings.frontier.points if p.cuts == findings.plan.plan.cuts))
    laptop.focus("#budget")
    laptop.keyboard.press("ArrowRight")
    check_shown(laptop, findings, findings.frontier[at + 1])
    laptop.keyboard.press("ArrowLeft")
    laptop.keyboard.press("ArrowLeft")
    check_shown(laptop, findings, findings.frontier[at - 1])
    laptop.keyboard.press("Home")
    check_shown(laptop, findings, findings.frontier[0])
    laptop.keyboard.press("End")
    check_shown(laptop, findings, findings.frontier[-1])


def test_mouse_moves_the_slider(laptop, findings):
    laptop.locator("#budget").scroll_into_view_if_needed()
    box = laptop.locator("#budget").bounding_box()
    laptop.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    laptop.mouse.down()
    laptop.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
    laptop.mouse.up()
    check_shown(laptop, findings, findings.frontier[0])


def test_buttons_select_the_fastest_best_and_chosen_plan(laptop, findings):
    for name, plan in (("fastest", findings.frontier[0]), ("best", findings.frontier[-2]), ("chosen", findings.plan)):
        laptop.click(f"#{name}")
        check_shown(laptop, findings, plan)


def test_names_with_tags_are_shown_as_text(laptop):
    assert laptop.text_content("h1") == f"{EVIL} and more"
    assert laptop.locator("#blocks .name").first.text_content() == EVIL
    assert laptop.locator("img").count() == 0


def test_selector_changes_the_heat_map(laptop):
    def drawn():
        return laptop.eval_on_selector_all(
            "#plot-latency .plot:not([hidden]) .cell", "all => all.map(one => getComputedStyle(one).fill)"
        )

    first = drawn()
    assert len(set(first)) > 20
    laptop.select_option("#select-latency", "1")
    assert drawn() != first
    assert laptop.locator("#plot-latency .plot:visible").count() == 1
    laptop.select_option("#select-latency", "0")
    assert drawn() == first


def middle(locator):
    box = locator.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_click_on_a_dot_selects_its_plan(laptop, findings):
    laptop.locator("#plot-frontier").scroll_into_view_if_needed()
    for n in (0, 7, len(findings.frontier) - 1):
        laptop.mouse.click(*middle(laptop.locator("#plot-frontier .canvas .plans .dot").nth(n)))
        check_shown(laptop, findings, findings.frontier[n])


def test_pointer_shows_the_text_of_dots_and_cells(laptop, findings):
    tip, plan = laptop.locator("#tip"), findings.frontier[0]
    laptop.locator("#plot-frontier").scroll_into_view_if_needed()
    x, y = middle(laptop.locator("#plot-frontier .canvas .plans .dot").first)
    laptop.mouse.move(x - 5, y + 5)
    assert tip.inner_text().startswith(f"Plan 1: {format.ms(plan.latency)}, ")
    assert f"importance {format.number(plan.importance)}, {len(plan.segments)} convolutions" in tip.inner_text()
    laptop.mouse.move(x, y - 150)
    assert not tip.is_visible()
    by_activations = laptop.locator("#plot-ablation .open .dot").first
    by_activations.scroll_into_view_if_needed()
    laptop.mouse.move(*middle(by_activations))
    assert tip.inner_text() == f"Merged by A: {format.ms(plan.latency_by_activations)}"
    cell = laptop.locator("#plot-latency .cell").first
    cell.scroll_into_view_if_needed()
    laptop.mouse.move(*middle(cell))
    entry = findings.latency.entries[0]
    assert tip.inner_text().startswith(f"{entry.span}: layer 1 ({EVIL})\n{format.ms(entry.times[1])} as ")


def test_tap_shows_the_text_of_a_cell_on_a_phone(phone, findings):
    cell = phone.locator("#plot-latency .cell").nth(2)
    cell.scroll_into_view_if_needed()
    phone.touchscreen.tap(*middle(cell))
    tip = phone.locator("#tip")
    assert tip.inner_text().startswith(f"{findings.latency.entries[2].span}: ")
    box = tip.bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["width"]
    phone.touchscreen.tap(5, 5)
    assert not tip.is_visible()


def test_figures_and_tables_need_no_javascript(browser, path, findings):
    page = browser.new_context(viewport=LAPTOP, java_script_enabled=False).new_page()
    page.goto(path.as_uri())
    dots = page.locator("#plot-frontier .canvas .plans .dot")
    assert dots.count() == len(findings.frontier)
    assert dots.first.is_visible()
    assert page.locator("#plot-latency .cell").first.is_visible()
    assert page.locator("#outcome table").is_visible()
    assert page.locator("noscript pre").is_visible()


def test_dots_are_drawn_at_their_values(laptop, findings):
    """Compare the pixels of dots and ticks, which separate elements place."""
    x_ticks, y_ticks, dots = laptop.evaluate(
        """() => [".ticks.bottom span", ".ticks.left span:not(.widest)", ".canvas .plans .dot"].map(query =>
            [...document.querySelectorAll("#plot-frontier " + query)].map(part => {
                const box = part.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2, part.textContent];
            }))"""
    )
    across, up = ([float(label.replace(format.MINUS, "-")) for *_, label in ticks] for ticks in (x_ticks, y_ticks))
    scale_x = (x_ticks[-1][0] - x_ticks[0][0]) / (across[-1] - across[0])
    scale_y = (y_ticks[-1][1] - y_ticks[0][1]) / (up[-1] - up[0])
    for (x, y, _), point in zip(dots, findings.frontier.points, strict=True):
        assert x == pytest.approx(x_ticks[0][0] + scale_x * (point.latency - across[0]), abs=1.5)
        assert y == pytest.approx(y_ticks[0][1] + scale_y * (point.importance - up[0]), abs=1.5)


@pytest.mark.parametrize("name", ["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_element_is_wider_than_the_page(request, name, scheme):
    page, width = request.getfixturevalue(name), {"laptop": LAPTOP, "phone": PHONE}[name]["width"]
    page.emulate_media(color_scheme=scheme)
    page.click("#fastest")
    for opened in (True, False):
        page.evaluate("is => document.querySelectorAll('details').forEach(part => part.open = is)", opened)
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        outside = """width => [...document.querySelectorAll("body *")].filter(part =>
            !part.closest(".scroll, pre, .unseen, .canvas") && part.getBoundingClientRect().right > width + 0.5
        ).map(part => part.outerHTML.slice(0, 80))"""
        assert page.evaluate(outside, width) == []


def test_touch_moves_the_slider(phone, findings):
    phone.locator("#budget").scroll_into_view_if_needed()
    box = phone.locator("#budget").bounding_box()
    phone.touchscreen.tap(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    check_shown(phone, findings, findings.frontier[-1])


def test_block_list_is_readable_on_a_phone(phone):
    """Check that every line has a readable size and is not cut."""
    phone.check("#unchanged")
    sizes = phone.evaluate(
        """() => [...document.querySelectorAll("#blocks p, #blocks .layer > span")]
        .filter(part => part.offsetParent && part.textContent)
        .map(part => [parseFloat(getComputedStyle(part).fontSize), part.scrollWidth - part.clientWidth])"""
    )
    assert len(sizes) > 100
    assert min(size for size, _ in sizes) >= 13
    assert all(hidden <= 0 for _, hidden in sizes)


def brightness(page, colour):
    return page.evaluate(
        """text => { const p = document.createElement("canvas").getContext("2d");
        p.fillStyle = text; p.fillRect(0, 0, 1, 1);
        const [r, g, b] = p.getImageData(0, 0, 1, 1).data; return (r + g + b) / 765; }""",
        colour,
    )


def colours(page):
    """Return the brightness of the page, of its text, and of the text in a plot."""
    return [
        brightness(page, page.evaluate(f"() => {expression}"))
        for expression in (
            "getComputedStyle(document.body).backgroundColor",
            "getComputedStyle(document.body).color",
            "getComputedStyle(document.querySelector('#plot-frontier .ticks span')).color",
        )
    ]


def test_dark_theme_follows_the_system_and_the_button_in_page_and_plots(laptop, findings):
    laptop.click("#fastest")
    laptop.emulate_media(color_scheme="dark")
    background, text, plot = colours(laptop)
    assert background < 0.2 < 0.5 < plot < text
    assert laptop.inner_text("#theme") == "Light theme"
    laptop.click("#theme")
    background, text, plot = colours(laptop)
    assert text < plot < 0.5 < 0.9 < background
    assert laptop.inner_text("#theme") == "Dark theme"
    check_shown(laptop, findings, findings.frontier[0])  # the theme does not change the plan
    laptop.click("#theme")
    assert colours(laptop)[0] < 0.2


def test_keyboard_reaches_every_control_in_order_with_a_visible_focus(laptop):
    laptop.evaluate("() => { document.activeElement.blur(); window.getSelection().removeAllRanges(); scrollTo(0, 0); }")
    laptop.focus(".skip")
    laptop.keyboard.press("Shift+Tab")
    seen = []
    for _ in range(60):
        laptop.keyboard.press("Tab")
        name, outline = laptop.evaluate(
            """() => { const part = document.activeElement; return [part.id || part.textContent.slice(0, 20),
            getComputedStyle(part).outlineStyle]; }"""
        )
        seen.append(name)
        assert outline != "none", name
        if name == "select-importance":
            break
    wanted = ["Skip to the results", "theme", "budget", "fastest", "chosen", "best", "unchanged", "select-latency"]
    assert [name for name in seen if name in wanted] == wanted
    assert seen[-1] == "select-importance"


OVERPRINTED = """() => [...document.querySelectorAll("#blocks .block")].flatMap(block => {
    const texts = [...block.querySelectorAll(".which, .name, .name + span, .marks > span, .becomes p, .times p")];
    const boxes = texts.map(part => {
        const range = document.createRange();
        part.querySelectorAll(".unseen").forEach(hidden => hidden.remove());
        range.selectNodeContents(part);
        return [...range.getClientRects()].map(({ left, right, top, bottom }) => ({ left, right, top, bottom, part }));
    });
    const upright = texts.filter((part, n) => new Set(boxes[n].map(line => Math.round(line.top))).size > 4);
    const cross = (one, two) => one.left < two.right - 1 && two.left < one.right - 1
        && one.top < two.bottom - 5 && two.top < one.bottom - 5;
    const crossing = boxes.flatMap((lines, n) => lines.filter(
        one => boxes.some((others, m) => m !== n && others.some(two => cross(one, two)))
    ).map(line => line.part));
    return [...upright, ...crossing].map(part => part.textContent);
})"""


@pytest.mark.parametrize("width", [390, 700, 736, 740, 800, 900, 1000, 1100, 1160, 1170, 1280, 1440])
def test_texts_of_a_block_do_not_overprint_at_any_width(browser, tmp_path, width):
    """Between a phone and a laptop, the column of the activations had no width."""
    run = measured_run()
    layers = [replace(layer, where=f"stage.{n}.conv") for n, layer in enumerate(run.network.layers)]
    path = report(replace(run, network=replace(run.network, layers=tuple(layers))), tmp_path / "report.html")
    page = Watched(browser, path.as_uri(), viewport={"width": width, "height": 900}).page
    for unchanged in (False, True):
        page.locator("#unchanged").set_checked(unchanged)
        for n in (0, 3, int(page.get_attribute("#budget", "max"))):
            page.locator("#budget").fill(str(n))
            assert page.evaluate("() => document.querySelectorAll('#blocks .mark').length") > 3
            assert page.evaluate(OVERPRINTED) == []
    page.context.close()


@pytest.mark.parametrize("width", [390, 736, 800, 880, 960, 1170])
def test_figures_stay_in_their_cards_at_any_width(laptop, width):
    laptop.set_viewport_size({"width": width, "height": 900})
    laptop.evaluate("() => { document.querySelector('.card .figure').textContent = '123.45\u202fms'; }")
    assert laptop.locator(".card .figure").count() == 4
    too_wide = """() => [...document.querySelectorAll(".card .figure")].filter(
        figure => figure.scrollWidth > figure.clientWidth
    ).map(figure => figure.textContent)"""
    assert laptop.evaluate(too_wide) == []
