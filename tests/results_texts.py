"""The hand-written texts of README.md and docs/results.md, and the committed results that their figures come from."""

import functools
import json
from pathlib import Path

import depthfold as df
from depthfold.core import Surrogate
from experiments.equal_latency.page import write as results_page
from experiments.equal_latency.page.text import SECTIONS
from experiments.equal_latency.results import RESULTS

ROOT = Path(__file__).parents[1]
WIDTHS = ("mobilenet_v2", "mobilenet_v2_1.4")


def words(text):
    return " ".join(text.split())


def readme():
    return words((ROOT / "README.md").read_text())


def remark(name):
    return words(SECTIONS[name].remark)


def at(results, share, method):
    return next(one for one in results.at(share) if one.method == method)


def rivals_of(results, method):
    return [one for one in results.measured if one.method == method and one.scores and one.profile]


@functools.cache
def sections():
    found = {results.name: results for results in results_page._results()}
    assert all(map(results_page.best, found.values())) and len(found) == 7, "the rows of the summary"
    return found


def load_latency(name):
    return df.LatencyTable.loads((RESULTS / name / "latency.json").read_text())


def load_importance(name):
    return df.ImportanceTable.loads((RESULTS / name / "importance.json").read_text())


def load_surrogate(name):
    return Surrogate.loads((RESULTS / name / "surrogate.json").read_text())


def pruning_steps(name, kind):
    """Return the steps of channel pruning by the share of the latency that they meet, without shares that none does."""
    found = json.loads((RESULTS / name / f"channels-{kind}.json").read_text())
    return {float(share): step for share, step in found.items() if step is not None}
