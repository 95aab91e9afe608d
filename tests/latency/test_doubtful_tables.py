"""Warnings about tables with a poor calibration or from a machine whose speed changed."""

import warnings
from dataclasses import dataclass
from itertools import count

import pytest
from torch import nn

from depthfold.backends.cost_model import CostModel
from depthfold.cli.printing import show_own_warnings_only
from depthfold.core import Span, Timing
from depthfold.latency import DoubtfulTable, measure_latency
from depthfold.latency.calibration import MAX_MEDIAN_ERROR, MAX_WORST_ERROR, warn_if_floored
from depthfold.pipeline import Options
from depthfold.pipeline.artefacts import make_latency_table
from depthfold.store import RunFolder
from latency_workshop import COST, QUICK


@dataclass(frozen=True)
class Busy(CostModel):
    """A busy machine: every third candidate takes twice as long."""

    def compile(self, module, inputs):
        compiled, number = super().compile(module, inputs), next(COMPILED)
        return Slow(compiled) if number % 3 == 0 else compiled


@dataclass
class Slow:
    compiled: object
    factor: float = 2.0

    def seconds(self):
        return self.factor * self.compiled.seconds()

    def close(self):
        self.compiled.close()


COMPILED = count()


def test_busy_machine_gives_a_warning(traced, tmp_path):
    text = (
        r"The latency table is doubtful: it is calibrated on \d+ whole networks: .* with an error of [\d.]+% in the "
        r"median.* If something else ran on this machine, delete the journal .*latency\.jsonl \(and latency\.json "
        r"beside it\), and measure again; otherwise go on with allow_doubtful=True \(--allow-doubtful\), because plans "
        r"are chosen by timing whole networks\.$"
    )
    with pytest.warns(DoubtfulTable, match=text) as caught:
        table = measure_latency(traced, Busy(), timer=QUICK, run=tmp_path)
    assert table.calibration.median_error > MAX_MEDIAN_ERROR
    assert [warning.filename for warning in caught if warning.category is DoubtfulTable] == [__file__]
    with pytest.warns(DoubtfulTable, match="on this machine, measure again; otherwise"):
        measure_latency(traced, Busy(), timer=QUICK)


@dataclass(frozen=True)
class BusyOnce(CostModel):
    """A machine that is busy while the original network is timed."""

    depth: int

    def compile(self, module, inputs):
        compiled = super().compile(module, inputs)
        convolutions = sum(isinstance(part, nn.Conv2d) for part in module.modules())
        return Slow(compiled) if convolutions == self.depth else compiled


def test_busy_moment_gives_a_warning(traced):
    convolutions = sum(isinstance(part, nn.Conv2d) for part in traced.graph.modules())
    text = "The latency table mispredicts a network: .* [3-9][0-9].[0-9]% at worst.*; otherwise go on with it, because"
    with pytest.warns(DoubtfulTable, match=text):
        table = measure_latency(traced, BusyOnce(depth=convolutions), timer=QUICK)
    assert table.calibration.median_error <= MAX_MEDIAN_ERROR
    assert table.calibration.worst_error > MAX_WORST_ERROR


def test_idle_machine_gives_no_warning(traced):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtfulTable)
        table = measure_latency(traced, COST, timer=QUICK)
        measure_latency(traced, Busy(), timer=QUICK, mode="alone")  # no calibration, so no warning
    assert table.calibration.median_error <= MAX_MEDIAN_ERROR


@pytest.mark.parametrize(("share", "warns"), [(0.2, False), (0.4, True)])
def test_many_layers_at_the_least_cost_give_a_warning(share, warns):
    """Whole networks may be predicted well all the same."""

    def layer(l, time):
        return Timing(span=Span(l - 1, l), times=(0.1, 0.1), quartiles=(time,) * 3, count=3, floored=(False, l == 2))

    entries = [layer(1, 1 - share), layer(2, share), Timing(span=Span(0, 2), reason="refused")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DoubtfulTable)
        warn_if_floored(entries, None)
    assert len(caught) == warns
    if warns:
        assert str(caught[0].message).startswith("The latency table gives 1 of 2 single layers the least cost")


def test_table_is_checked_for_layers_at_the_least_cost(traced, monkeypatch):
    monkeypatch.setattr("depthfold.latency.calibration.MAX_FLOORED", -1)
    with pytest.warns(DoubtfulTable, match="gives 0 of .* single layers the least cost") as caught:
        measure_latency(traced, COST, timer=QUICK)
    assert [warning.filename for warning in caught if warning.category is DoubtfulTable] == [__file__]


class Stopped(Exception):
    pass


def interrupt(traced, run, blocks=20):
    """Interrupt a measurement after all rounds of some blocks."""
    rounds = count(1)

    def stop(what, total, done=0):
        def tick():
            if what == "blocks" and next(rounds) > blocks * QUICK.rounds:
                raise Stopped

        return tick

    with pytest.raises(Stopped):
        measure_latency(traced, COST, timer=QUICK, run=run, networks=12, progress=stop)


@dataclass(frozen=True)
class Slower(CostModel):
    """The same machine at another speed."""

    factor: float = 2.0

    def environment(self, inputs):
        return COST.environment(inputs)

    def compile(self, module, inputs):
        return Slow(CostModel.compile(self, module, inputs), self.factor)


@pytest.mark.parametrize("factor", [1.3, 0.7])
@pytest.mark.parametrize("mode", ["in context", "alone"])
def test_resuming_at_another_speed_gives_a_warning(traced, tmp_path, factor, mode):
    interrupt(traced, tmp_path)
    text = rf"A block of the journal .*latency\.jsonl .* now takes {factor:.2f} times as long as .*\. Delete it"
    with pytest.warns(DoubtfulTable, match=text) as caught:
        measure_latency(traced, Slower(factor=factor), timer=QUICK, run=tmp_path, networks=12, mode=mode)
    assert {warning.filename for warning in caught if warning.category is DoubtfulTable} == {__file__}


def test_another_speed_is_not_forgotten_if_the_resumed_measurement_is_interrupted(traced, tmp_path):
    interrupt(traced, tmp_path)

    def stop(what, total, done=0):
        if what == "networks":
            raise Stopped
        return lambda: None

    slower, given = Slower(factor=1.3), dict(timer=QUICK, run=tmp_path, networks=12)
    with pytest.warns(DoubtfulTable, match="now takes 1.30 times"), pytest.raises(Stopped):
        measure_latency(traced, slower, **given, progress=stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DoubtfulTable)
        table = measure_latency(traced, slower, **given)  # no block is missing
    assert table.doubt == "a block took 1.30 times as long as before when the measurement was resumed"


def test_resuming_at_the_same_speed_or_a_complete_journal_gives_no_warning(traced, tmp_path):
    journal = tmp_path / "latency.jsonl"
    interrupt(traced, tmp_path)
    given = dict(timer=QUICK, run=tmp_path, networks=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtfulTable)
        table = measure_latency(traced, Slower(factor=1.05), **given)
        before = journal.read_text()
        assert measure_latency(traced, Slower(factor=9.0), **given) == table  # nothing is missing
    assert journal.read_text() == before


def test_command_line_shows_the_warning(traced, tmp_path, capsys):
    with warnings.catch_warnings():
        show_own_warnings_only()
        make_latency_table(RunFolder.open(tmp_path / "run"), traced, Busy(), Options(), no_progress)
    assert "The latency table is doubtful" in " ".join(capsys.readouterr().err.split())


def no_progress(what, total, done=0):
    return lambda: None
