"""The page as a document: its contents, missing parts, well-formed HTML, escaping and size."""

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import jinja2
import pytest

from depthfold.core import Calibration, Environment, Refusal
from depthfold.errors import InvalidValue, MissingDependency
from depthfold.reporting import Evaluation, Int8File, Verified, format, report, view
from depthfold.reporting.report import _templates, page
from depthfold.solver import solve
from runs import loaded_run, made_up_run, measured_run, profile
from structures import chain, mobilenet_v2, vgg19
from tables import plausible_tables

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\""
VOID = {"meta", "link", "input", "img", "br", "wbr"}
LARGEST = 2_000_000  # bytes


class Document(HTMLParser):
    """The elements of a page in order, with tag, attributes and text, and the rows of its tables."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, *tags):
        return [element for element in self.elements if element["tag"] in tags]

    def id(self, name):
        return next(element for element in self.elements if element.get("id") == name)

    @property
    def rows(self):
        """The cells of every row of every table, by the text of the first cell."""
        found, row = {}, None
        for element in self.all("tr", "th", "td"):
            if element["tag"] == "tr":
                row = []
            else:
                row.append(element["text"].replace("\u202f", " ").replace("\xa0", " "))
                found[row[0]] = row
        return found


@pytest.fixture(scope="module")
def full():
    return Document(page(measured_run()))


def text_of(document, section):
    return " ".join(document.id(section)["text"].split())


def test_results_table_shows_both_profiles(full):
    findings = measured_run()
    low, high = findings.after.spread
    rows = full.rows
    assert rows["Latency, median"] == ["Latency, median", "20.00 ms", "12.50 ms", "1.60× as fast"]  # noqa: RUF001
    assert rows["Latency, interquartile range"][2] == f"{low:.2f} ms to {high:.2f} ms"
    assert rows["Multiply-adds"] == ["Multiply-adds", "300 M", "225 M", "−25.0 %"]  # noqa: RUF001
    assert rows["Parameters"] == ["Parameters", "3.5 M", "4.2 M", "+20.0 %"]
    assert rows["Peak memory"] == ["Peak memory", "31 MB", "not measured: the process was killed", ""]
    assert rows["Convolutions in the whole network"][1:] == ["52", "30", "−42.3 %"]  # noqa: RUF001
    assert rows["Convolutions in the traced part"][1:3] == ["50", str(len(findings.plan.segments))]
    accuracy = rows["Top-1 accuracy on the test set"]
    assert accuracy[1] == "72.00 % (± 0.45 points standard error, 10,000 images)"
    assert accuracy[3] == "−1.50 points"  # noqa: RUF001


def test_unreliable_speedup_is_marked_wherever_it_is_shown(full):
    document = Document(page(loaded_run()))
    assert document.rows["Latency, median"][3] == "1.60× as fast, unreliable"  # noqa: RUF001
    (accent,) = [element["text"] for element in document.all("div") if element.get("class") == "card accent"]
    assert "unreliable: the original took 12 to 31 ms; something else was probably running" in accent
    assert "unreliable" not in text_of(full, "outcome") and "measured end to end" in text_of(full, "outcome")


def test_unreliable_times_of_int8_files_are_marked():
    file = Int8File(name="m.onnx", split="test", score=91.0, float32_score=92.0, latency=1.0, float32_latency=2.0)
    doubtful = dataclasses.replace(file, name="busy.onnx", unreliable="the INT8 file took 1 to 3 ms")
    rows = Document(page(measured_run(int8=(file, doubtful)))).rows
    assert rows["m.onnx"][3] == "2.00× as fast"  # noqa: RUF001
    assert rows["busy.onnx"][3] == "2.00× as fast, unreliable: the INT8 file took 1 to 3 ms"  # noqa: RUF001


@pytest.mark.parametrize(("threads", "text"), [(1, "with 1 thread,"), (2, "with 2 threads,"), (None, "alternately,")])
def test_threads_of_int8_files_are_counted(threads, text):
    environment = dataclasses.replace(measured_run().environment, threads=threads)
    file = Int8File(
        name="m.onnx", split="test", score=9.0, float32_score=9.0, latency=1.0, float32_latency=2.0,
        environment=environment,
    )  # fmt: skip
    assert text in page(measured_run(int8=(file,)))


def test_small_counts_are_shown_in_thousands():
    before, after = (profile(1.0, flops=2 * n, parameters=n, depth=3, memory=None) for n in (78_510, 363))
    rows = Document(page(measured_run(before=before, after=after))).rows
    for name in ("Multiply-adds", "Parameters"):
        assert rows[name][1:3] == ["78.51 k", "363"]


def test_predicted_latency_is_compared_with_the_measured_one():
    text = text_of(Document(page(measured_run(predicted=13.0))), "outcome")
    assert "The predicted latency of the compressed network is 13.00 ms and the measured latency is 12.50 ms" in text
    assert "off by +4.0 %" in text
    assert "The merged network computes the same function as the trained one: largest error 2e−06." in text  # noqa: RUF001


def test_failed_verification_and_different_environments_are_stated():
    after = dataclasses.replace(measured_run().after, environment=Environment(machine="a phone", batch=1))
    findings = measured_run(after=after, verification=Verified(ok=False, text="largest error 3"))
    text = text_of(Document(page(findings)), "outcome")
    assert "DOES NOT compute the same function as the trained one: largest error 3" in text
    assert "different environments, so they are not directly comparable: machine: a laptop against a phone" in text


def test_missing_parts_are_left_out_and_listed():
    document = Document(page(made_up_run()))
    text = text_of(document, "outcome")
    assert "This report does not include the end-to-end measurement of the original network, " in text
    assert "predicted, not measured" in text
    assert not {"Latency, median", "Multiply-adds", "Peak memory"} & set(document.rows)
    where = text_of(document, "provenance")
    assert "No environment is stated" in where
    assert not any("No environment is stated" in part["text"] for part in document.all("details"))  # it is not folded
    assert "Normalisation: none is stated" in where
    assert "not calibrated" in where
    assert "The provenance is not stated" in where


def test_one_of_two_measurements_is_enough():
    for absent in ("before", "after", "score_before", "score_after"):
        document = Document(page(measured_run(**{absent: None})))
        row = "Latency, median" if "score" not in absent else "Top-1 accuracy on the test set"
        column = 1 if "before" in absent else 2
        assert document.rows[row][column] == "not measured"
        assert document.rows[row][3 - column] != "not measured"


def test_spread_over_training_runs_precedes_the_number_of_images():
    score = Evaluation(score=0.7, spread=0.0021, images=500)
    row = Document(page(measured_run(score_after=score))).rows["Accuracy on the test set"]
    assert row[2] == "70.00 % (± 0.21 points over training runs, 500 images)"


def test_refusals_are_grouped_and_barriers_have_a_reason():
    network = vgg19()
    refusals = (*network.refusals, Refusal("pool9", "pooling", "pooling is not a convolution"))
    document = Document(page(made_up_run(dataclasses.replace(network, refusals=refusals))))
    assert document.rows["pooling"] == [
        "pooling",
        "pooling is not a convolution",
        "pool2, pool4, pool8, pool12 and pool9",
    ]
    assert document.rows["after layer 4"] == ["after layer 4", "conv4", "pooling is not a convolution"]
    without = text_of(Document(page(made_up_run(chain(3, 3)))), "refusals")
    assert "Nothing in this network was refused" in without
    assert "The network has no barrier" in without
    assert "Every block has a time and a score." in without


def test_blocks_without_a_time_or_a_score_are_listed(full):
    findings = measured_run()
    untimed = next(entry.span for entry in findings.latency.entries if entry.reason)
    unscored = next(entry.span for entry in findings.importance.entries if entry.reason)
    assert full.rows["no time"] == ["no time", "out of memory", str(untimed)]
    assert full.rows["no score"] == ["no score", "the loss is NaN", str(unscored)]


def test_provenance_states_calibration_and_normalisation(full):
    findings = measured_run()
    calibration = Calibration(slope=1, per_segment=0, per_read=0, per_write=0, outside=1.5, networks=20,
                              median_error=0.012, worst_error=0.034)  # fmt: skip
    changed = dataclasses.replace(
        findings,
        latency=dataclasses.replace(findings.latency, calibration=calibration),
        importance=dataclasses.replace(findings.importance, provenance="ten seeds"),
        frontier=dataclasses.replace(findings.frontier, alpha=1.6),
        command=None,
    )
    text = text_of(Document(page(changed)), "provenance")
    assert "with an error of 1.2% in the median, 3.4% at worst" in text
    assert "outside the spans, 1.500 ms" in text
    assert "Provenance: ten seeds." in text
    assert "alpha = 1.6" in text
    assert f"The frontier is exact and has {len(findings.frontier)} plans." in text
    assert f'frontier.at("{findings.plan.latency!r}ms")' in text
    assert "network=traced.network, alpha=1.6)" in text
    assert "depthfold compress --budget 60%" in text_of(full, "provenance")
    assert full.rows["torch"] == ["torch", "2.13.0"]
    assert "The stem was left out." in text_of(full, "provenance")


@pytest.mark.parametrize("part", ["title", "layers", "refusals", "notes", "reason"])
def test_names_from_models_stay_text(part):
    findings = measured_run()
    network = findings.network
    if part == "layers":
        layers = tuple(dataclasses.replace(layer, where=EVIL) for layer in network.layers)
        findings = dataclasses.replace(findings, network=dataclasses.replace(network, layers=layers))
    elif part == "refusals":
        refusals = (Refusal(EVIL, EVIL, EVIL),)
        findings = dataclasses.replace(findings, network=dataclasses.replace(network, refusals=refusals))
    elif part == "reason":
        entries = tuple(dataclasses.replace(e, reason=EVIL) if e.reason else e for e in findings.latency.entries)
        findings = dataclasses.replace(findings, latency=dataclasses.replace(findings.latency, entries=entries))
    else:
        findings = dataclasses.replace(findings, **{part: EVIL if part == "title" else (EVIL,)})
    document = Document(page(findings))
    assert len(document.all("script")) == 3
    assert not document.all("img")
    assert any(EVIL in element["text"] for element in document.all("h1", "td", "th", "li"))
    if part == "layers":
        assert json.loads(document.id("report-data")["text"])["layers"][0]["name"] == EVIL
        cells = [element for element in document.all("rect") if "data-text" in element]
        assert len(cells) > 100
        assert all(EVIL in cell["data-text"] for cell in cells)


def test_embedded_json_cannot_end_its_element():
    names = [EVIL, "</script ", "<!--<script>", "]]>"]
    text = _templates(jinja2).from_string("{{ names | tojson }}").render(names=names)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == names


def test_policy_allows_only_the_scripts_of_the_page_and_no_connection(full):
    policy = next(element["content"] for element in full.all("meta") if "http-equiv" in element)
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    scripts = [element["text"] for element in full.all("script") if "type" not in element]
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(hashes) == 2
    assert "script-src 'unsafe-inline'" not in policy


def test_page_refers_to_no_other_file(full):
    for element in full.elements:
        for name in ("src", "href", "action", "data"):
            assert element.get(name, "#").startswith(("#", "data:")), element
    styles = "".join(element["text"] for element in full.all("style"))
    assert "url(" not in styles
    assert "@import" not in styles


def test_page_is_accessible_to_screen_readers(full):
    levels = [int(element["tag"][1]) for element in full.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert [len(full.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    ids = [element["id"] for element in full.elements if "id" in element]
    assert len(ids) == len(set(ids))
    for element in full.elements:
        for reference in ("for", "aria-labelledby"):
            assert element.get(reference, ids[0]) in ids
    assert len(full.all("caption")) == len(full.all("table"))
    assert all(cell.get("scope") in ("row", "col") for cell in full.all("th"))
    plots = [element for element in full.elements if element.get("id", "").startswith("plot-")]
    assert len(plots) == 6
    assert all(plot["role"] == "img" and len(plot["aria-label"]) > 40 for plot in plots)
    assert len(full.all("figcaption")) == 5


def test_thinned_frontier_and_plan_off_the_frontier_are_stated(monkeypatch):
    findings = made_up_run()
    missing = tuple(p for p in findings.frontier.points if p.latency != findings.plan.latency)
    frontier = dataclasses.replace(findings.frontier, points=missing)
    text = text_of(Document(page(dataclasses.replace(findings, frontier=frontier))), "explorer")
    assert "The chosen plan is not on the frontier and is shown in addition." in text
    monkeypatch.setattr(view.select_plans, "__defaults__", (20,))
    shown = len(view.select_plans(findings.frontier, findings.plan).points)
    assert shown < len(findings.frontier)
    text = text_of(Document(page(findings)), "explorer")
    assert (
        f"The frontier has {len(findings.frontier)} plans. This page shows {shown} of them: the fastest, the slowest"
        in text
    )


def test_report_writes_the_page_and_returns_its_path(tmp_path):
    findings = made_up_run(chain(3, 3))
    written = report(findings, str(tmp_path / "new" / "report.html"))
    assert written == tmp_path / "new" / "report.html"
    assert written.read_text(encoding="utf-8") == page(findings)
    assert [file.name for file in written.parent.iterdir()] == ["report.html"]


def test_report_refuses_other_arguments_and_unwritable_paths(tmp_path):
    with pytest.raises(InvalidValue, match=r"report\(\) takes Findings, found dict. Build them with Findings\(title"):
        report({}, tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidValue,
        match=r"The report '.*file/report.html' cannot be written: .* and its free space, or choose another path",
    ):
        report(made_up_run(chain(3, 3)), tmp_path / "file" / "report.html")


def test_report_without_jinja_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependency, match=r"In a clone of depthfold, run: pip install -e .\.\[report\]."):
        report(made_up_run(chain(3, 3)), tmp_path / "report.html")


def test_importing_reporting_loads_neither_torch_nor_jinja():
    code = "import sys, depthfold.reporting; print([n for n in ('torch', 'jinja2', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_profile_of_a_single_run_has_no_spread():
    single = dataclasses.replace(profile(2.0, flops=1, parameters=1, depth=1, memory=1), quartiles=(2.0, 2.0, 2.0))
    assert single.spread == (2.0, 2.0)


def test_empty_cells_of_the_latency_map_may_be_mergeable_spans():
    """The paper's search space leaves out spans that can be merged, so the page must not state that they cannot."""
    findings = made_up_run()
    held = {entry.span for entry in findings.latency.entries}
    assert set(findings.network.spans("full")) - held
    text = text_of(Document(page(findings)), "tables")
    assert "A cell is empty if the span cannot be merged or is not in the search space." in text


def test_latency_table_has_both_times_of_every_span():
    findings = made_up_run()
    text, _, _ = page(findings).partition("Importance, I[")
    cells = [re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in text.split("<tr>")]
    header = next(row for row in cells if row and row[0] == "Span")
    columns = [header.index(name) for name in ("With an activation at its end", "Without one")]
    rows = {row[0]: [row[column] for column in columns] for row in cells if row and row[0].startswith("(")}
    different = 0
    for entry in findings.latency.entries:
        times = (entry.times or (None, None))[::-1]
        assert rows[str(entry.span)] == ["none" if time is None else format.ms(time) for time in times]
        different += times[0] != times[1]
    assert different > 20


@pytest.mark.parametrize("space", ["paper", "full"])
def test_page_of_mobilenet_is_small(space):
    network = mobilenet_v2()
    latency, importance = plausible_tables(network.spans(space), network.flagged_spans(space), 0)
    frontier = solve(latency, importance, network=network)
    findings = measured_run(latency=latency, importance=importance, frontier=frontier, plan=frontier[-1])
    assert len(page(findings).encode()) < LARGEST


def test_every_figure_is_valid_xml(full):
    text = page(measured_run())
    drawings = re.findall(r"<svg class=\"canvas\".*?\n</svg>\n", text, re.DOTALL)
    assert len(drawings) == 4 + len(full.all("option"))
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_chosen_plan_is_in_the_page_without_scripts(full):
    assert full.all("pre")[0]["text"] == str(measured_run().plan)
