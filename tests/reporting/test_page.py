"""The page as a document: what it says, what it leaves out, that it is well formed, and that names stay text."""

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from depthfold.core import Calibration, Environment, Refusal
from depthfold.errors import InvalidValue, MissingDependency
from depthfold.reporting import Evaluation, Verified, report, words
from depthfold.reporting.exhibits import frontier_section, tables_section
from depthfold.reporting.markup import embedded
from depthfold.reporting.plans import shown
from depthfold.reporting.report import page
from lacking import needs
from runs import made_up_run, measured_run, profile
from structures import chain, vgg19

pytestmark = needs("plotly")

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\""
VOID = {"meta", "link", "input", "img", "br"}


class Document(HTMLParser):
    """The elements of a page in order: tag, attributes and text; and the rows of its tables by caption."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

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
        """The cells of every row of every table, by what the first cell says."""
        found, row = {}, None
        for element in self.all("tr", "th", "td"):
            if element["tag"] == "tr":
                row = []
            else:
                row.append(element["text"].replace("\u202f", " "))
                found[row[0]] = row
        return found


@pytest.fixture(scope="module")
def full():
    return Document(page(measured_run()))


def said(document, section):
    return document.id(section)["text"].replace("\u202f", " ")


def test_before_and_after_are_the_profiles(full):
    findings = measured_run()
    low, high = findings.after.spread
    rows = full.rows
    assert rows["Latency, median"] == ["Latency, median", "20.00 ms", "12.50 ms", "1.60× as fast"]  # noqa: RUF001
    assert rows["Latency, middle half"][2] == f"{low:.2f} ms to {high:.2f} ms"
    assert rows["Multiply-adds"] == ["Multiply-adds", "300 M", "225 M", "−25.0 %"]  # noqa: RUF001
    assert rows["Parameters"] == ["Parameters", "3.5 M", "4.2 M", "+20.0 %"]
    assert rows["Peak memory"] == ["Peak memory", "31 MB", "not measured: the process was killed", ""]
    assert rows["Convolutions in the whole network"][1:] == ["52", "30", "−42.3 %"]  # noqa: RUF001
    assert rows["Convolutions in what was traced"][1:3] == ["50", str(len(findings.plan.segments))]
    accuracy = rows["Top-1 accuracy on the test set"]
    assert accuracy[1] == "72.00 % (± 0.45 points standard error, 10,000 images)"
    assert accuracy[3] == "−1.50 points"  # noqa: RUF001


def test_a_small_network_is_counted_in_thousands():
    before, after = (profile(1.0, flops=2 * n, parameters=n, depth=3, memory=None) for n in (78_510, 363))
    rows = Document(page(measured_run(before=before, after=after))).rows
    for name in ("Multiply-adds", "Parameters"):
        assert rows[name][1:3] == ["78.51 k", "363"]


def test_predicted_stands_against_measured():
    text = said(Document(page(measured_run(predicted=13.0))), "outcome")
    assert "13.00 ms were predicted for the compressed network and 12.50 ms were measured" in text
    assert "off by +4.0 %" in text
    assert "The merged network computes what the trained one computes: largest error 2e-06." in text


def test_a_failed_verification_and_different_environments_are_said_aloud():
    after = dataclasses.replace(measured_run().after, environment=Environment(machine="a phone", batch=1))
    findings = measured_run(after=after, verification=Verified(ok=False, text="largest error 3"))
    text = said(Document(page(findings)), "outcome")
    assert "DOES NOT compute the same: largest error 3" in text
    assert "different environments, so compare with care: machine: a laptop against a phone" in text


def test_what_is_missing_is_left_out_and_said():
    document = Document(page(made_up_run()))
    text = said(document, "outcome")
    assert "Not in this report, because it was not given: the original network measured end to end, " in text
    assert "predicted, not measured" in text
    assert not {"Latency, median", "Multiply-adds", "Peak memory"} & set(document.rows)
    where = said(document, "provenance")
    assert "No environment is stated" in where
    assert "Normalisation: none is stated" in where
    assert "not calibrated in context" in where
    assert "Its provenance is not stated" in where


def test_one_half_of_a_pair_is_enough():
    for absent in ("before", "after", "score_before", "score_after"):
        document = Document(page(measured_run(**{absent: None})))
        row = "Latency, median" if "score" not in absent else "Top-1 accuracy on the test set"
        column = 1 if "before" in absent else 2
        assert document.rows[row][column] == "not measured"
        assert document.rows[row][3 - column] != "not measured"


def test_a_spread_over_trainings_is_said_before_the_number_of_images():
    score = Evaluation(score=0.7, spread=0.0021, images=500)
    row = Document(page(measured_run(score_after=score))).rows["Accuracy on the test set"]
    assert row[2] == "70.00 % (± 0.21 points over trainings, 500 images)"


def test_refusals_are_grouped_and_barriers_have_their_reason():
    network = vgg19()
    refusals = (*network.refusals, Refusal("pool9", "pooling", "pooling is no convolution"))
    document = Document(page(made_up_run(dataclasses.replace(network, refusals=refusals))))
    assert document.rows["pooling"] == ["pooling", "pooling is no convolution", "pool2, pool4, pool8, pool12 and pool9"]
    assert document.rows["after layer 4"] == ["after layer 4", "conv4", "pooling is no convolution"]
    untroubled = said(Document(page(made_up_run(chain(3, 3)))), "refusals")
    assert "Nothing in this network was refused" in untroubled
    assert "There is no barrier" in untroubled
    assert "Every block has a time and a score." in untroubled


def test_blocks_without_a_time_or_a_score_are_named(full):
    findings = measured_run()
    untimed = next(entry.span for entry in findings.latency.entries if entry.reason)
    unscored = next(entry.span for entry in findings.importance.entries if entry.reason)
    assert full.rows["no time"] == ["no time", "out of memory", str(untimed)]
    assert full.rows["no score"] == ["no score", "the loss is NaN", str(unscored)]


def test_provenance_has_the_calibration_and_the_normalisation(full):
    findings = measured_run()
    calibration = Calibration(slope=1, per_segment=0, per_read=0, per_write=0, outside=1.5, networks=20,
                              median_error=0.012, worst_error=0.034)  # fmt: skip
    told = dataclasses.replace(
        findings,
        latency=dataclasses.replace(findings.latency, calibration=calibration),
        importance=dataclasses.replace(findings.importance, provenance="ten seeds"),
        frontier=dataclasses.replace(findings.frontier, alpha=1.6, normalisation="single", lost=0.01),
        command=None,
    )
    text = said(Document(page(told)), "provenance")
    assert "with an error of 1.2% in the median, 3.4% at worst" in text
    assert "outside the spans, 1.500 ms" in text
    assert "Provenance: ten seeds." in text
    assert "alpha = 1.6" in text
    assert "thinned: at most 0.01" in text
    assert f"frontier.at({findings.plan.latency!r})" in text
    assert "alpha=1.6, normalisation='single'" in text
    assert "depthfold compress --budget 60%" in said(full, "provenance")
    assert full.rows["torch"] == ["torch", "2.13.0"]
    assert "The stem was left out." in said(full, "provenance")


@pytest.mark.parametrize("part", ["title", "layers", "refusals", "notes", "reason"])
def test_names_from_outside_stay_text(part):
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
    assert len(document.all("script")) == 4
    assert not document.all("img")
    assert any(EVIL in element["text"] for element in document.all("h1", "td", "th", "li"))
    if part == "layers":
        assert json.loads(document.id("report-data")["text"])["explorer"]["layers"][0]["name"] == EVIL


def test_embedded_json_cannot_end_its_element():
    names = [EVIL, "</script ", "<!--<script>", "]]>"]
    text = embedded(names)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == names


def test_the_policy_allows_these_scripts_and_no_connection(full):
    policy = next(element["content"] for element in full.all("meta") if "http-equiv" in element)
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    scripts = [element["text"] for element in full.all("script") if "type" not in element]
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(hashes) == 3
    assert "script-src 'unsafe-inline'" not in policy


def test_nothing_on_the_page_comes_from_elsewhere(full):
    for element in full.elements:
        for name in ("src", "href", "action", "data"):
            assert element.get(name, "#").startswith(("#", "data:")), element
    styles = "".join(element["text"] for element in full.all("style"))
    assert "url(" not in styles
    assert "@import" not in styles


def test_the_page_is_in_order_for_a_screen_reader(full):
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
    assert len(plots) == 4
    assert all(plot["role"] == "img" and len(plot["aria-label"]) > 40 for plot in plots)
    assert len(full.all("figcaption")) == 4


def test_a_thinned_frontier_and_a_plan_off_it_are_said():
    findings = made_up_run()
    plans = shown(findings.frontier, findings.plan, most=20)
    text = frontier_section(findings, plans)
    assert (
        f"The frontier has {len(findings.frontier)} plans. Shown are {len(plans.points)} of them: the fastest" in text
    )
    lacking = tuple(p for p in findings.frontier.points if p.latency != findings.plan.latency)
    frontier = dataclasses.replace(findings.frontier, points=lacking)
    assert "The chosen plan is not on the frontier and is shown in addition." in page(
        dataclasses.replace(findings, frontier=frontier)
    )


def test_report_writes_the_page_and_says_where(tmp_path):
    findings = made_up_run(chain(3, 3))
    written = report(findings, str(tmp_path / "new" / "report.html"))
    assert written == tmp_path / "new" / "report.html"
    assert written.read_text(encoding="utf-8") == page(findings)
    assert [file.name for file in written.parent.iterdir()] == ["report.html"]


def test_report_says_what_it_takes_and_where_it_cannot_write(tmp_path):
    with pytest.raises(InvalidValue, match=r"report\(\) takes Findings, found dict. Build them with Findings\(title"):
        report({}, tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidValue,
        match=r"The report '.*file/report.html' cannot be written: .* and its free space, or name another",
    ):
        report(made_up_run(chain(3, 3)), tmp_path / "file" / "report.html")


def test_without_plotly_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingDependency, match=r"Install it with: pip install depthfold\[report\]"):
        report(made_up_run(chain(3, 3)), tmp_path / "report.html")


def test_reporting_imports_neither_torch_nor_plotly():
    code = "import sys, depthfold.reporting; print([n for n in ('torch', 'plotly', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_profile_of_a_single_run_has_no_spread():
    single = dataclasses.replace(profile(2.0, flops=1, parameters=1, depth=1, memory=1), quartiles=(2.0, 2.0, 2.0))
    assert (single.latency, single.spread) == (2.0, (2.0, 2.0))


def test_an_empty_cell_of_the_latency_map_may_be_a_span_that_merges():
    """The paper's search space leaves out spans that could be merged, and the page must not say that they cannot."""
    findings = made_up_run()
    held = {entry.span for entry in findings.latency.entries}
    assert set(findings.network.spans("full")) - held
    text = " ".join(str(tables_section(findings, ("ms",), ("both",))).split())
    assert "the table holds no such span: it cannot be merged, or is not in the search space." in text


def test_the_latency_table_has_both_times_of_every_span():
    findings = made_up_run()
    text, _, _ = str(tables_section(findings, (), ())).partition("Importance, I[")
    cells = [re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in text.split("<tr>")]
    header = next(row for row in cells if row and row[0] == "Span")
    columns = [header.index(name) for name in ("With an activation at its end", "Without one")]
    rows = {row[0]: [row[column] for column in columns] for row in cells if row and row[0].startswith("(")}
    different = 0
    for entry in findings.latency.entries:
        without, with_one = entry.times or (None, None)
        assert rows[str(entry.span)] == ["none" if time is None else words.ms(time) for time in (with_one, without)]
        different += without != with_one
    assert different > 20
