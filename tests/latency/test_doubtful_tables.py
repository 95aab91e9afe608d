"""A table whose calibration did not work out says so."""

import warnings
from dataclasses import dataclass
from itertools import count

import pytest

from depthfold.backends.cost_model import CostModel
from depthfold.cli.printing import hush_libraries
from depthfold.latency import DoubtfulTable, measure_latency
from depthfold.latency.measure import DOUBTFUL
from depthfold.pipeline.tables import latency_of
from depthfold.store import RunFolder
from latency_workshop import COST, QUICK


@dataclass(frozen=True)
class Busy(CostModel):
    """Every third thing that is timed takes twice as long: something else runs on this machine."""

    def compile(self, module, inputs):
        compiled, number = super().compile(module, inputs), next(COMPILED)
        return Slow(compiled) if number % 3 == 0 else compiled


@dataclass
class Slow:
    compiled: object

    def seconds(self):
        return 2 * self.compiled.seconds()

    def close(self):
        self.compiled.close()


COMPILED = count()


def test_a_machine_that_does_something_else_is_noticed(network, tmp_path):
    journal = tmp_path / "latency.jsonl"
    text = (
        r"The latency table is doubtful: it is calibrated on \d+ whole networks: .* with an error of [\d.]+% in the "
        r"median.* If something else ran on this machine, delete the journal .*latency\.jsonl \(in a run folder, "
        r"latency\.json, too\), and measure again when it is quiet; otherwise trust what choose\(\) times"
    )
    with pytest.warns(DoubtfulTable, match=text) as caught:
        table = measure_latency(network, Busy(), timer=QUICK, journal=journal)
    assert table.calibration.median_error > DOUBTFUL
    assert [warning.filename for warning in caught if warning.category is DoubtfulTable] == [__file__]
    with pytest.warns(DoubtfulTable, match="on this machine, measure again when it is quiet"):
        measure_latency(network, Busy(), timer=QUICK)


def test_a_quiet_one_is_not_accused(network):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtfulTable)
        table = measure_latency(network, COST, timer=QUICK)
        measure_latency(network, Busy(), timer=QUICK, mode="alone")  # nothing is calibrated, so nothing is claimed
    assert table.calibration.median_error <= DOUBTFUL


def test_the_command_line_shows_it(network, tmp_path, capsys):
    with warnings.catch_warnings():
        hush_libraries()
        latency_of(RunFolder.open(tmp_path / "run"), network, Busy(), "paper", no_progress)
    assert "The latency table is doubtful" in " ".join(capsys.readouterr().err.split())


def no_progress(what, total, done=0):
    return lambda: None
