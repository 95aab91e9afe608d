"""--retry measures again what the runtime rejected, and only that."""

import json

import pytest
from torch import nn

from cli_workshop import depthfold
from depthfold.backends.cost_model import CostModel
from depthfold.core import LatencyTable, Span
from depthfold.errors import OutOfMemory

WHOLE = Span(0, 3)  # the three layers of the tiny network as one, with a 7x7 kernel


class Neighbour:
    """Another process on the same accelerator: while it runs, large kernels do not fit."""

    def __init__(self, monkeypatch):
        self.there, self.kernels, compile = True, [], CostModel.compile

        def crowded(backend, module, inputs):
            kernel = max(getattr(part, "kernel_size", (1,))[0] for part in module.modules())
            if not any(isinstance(part, nn.Linear) for part in module.modules()):  # a block, not a whole network
                self.kernels.append(kernel)
            if self.there and kernel >= 7:
                raise OutOfMemory("out of memory")
            return compile(backend, module, inputs)

        monkeypatch.setattr(CostModel, "compile", crowded)


@pytest.fixture
def neighbour(monkeypatch):
    return Neighbour(monkeypatch)


@pytest.fixture
def run(workshop, neighbour, tmp_path):
    done("latency", "--config", workshop / "tiny.toml", "--run", tmp_path / "run")
    return tmp_path / "run"


def done(*arguments):
    result = depthfold(*arguments)
    assert result.exit_code == 0, result.output


def table_of(run):
    return LatencyTable.loads((run / "latency.json").read_text())


def reasons(run):
    return {entry.span: entry.reason for entry in table_of(run).entries if entry.reason is not None}


@pytest.mark.parametrize("command", ["latency", "compress"])
def test_rejected_blocks_are_measured_again_with_retry(command, run, neighbour):
    assert reasons(run) == {WHOLE: "out of memory"}
    before, kept = table_of(run), (run / "latency.json").read_bytes()
    neighbour.there = False
    neighbour.kernels.clear()
    done("latency", "--run", run)
    assert (run / "latency.json").read_bytes() == kept and neighbour.kernels == []
    done(command, "--run", run, "--retry")
    assert reasons(run) == {}
    if command == "latency":
        others = [kernel for kernel in neighbour.kernels if kernel != 7]
        assert len(others) == 1  # the others are in the journal; one is measured again to compare the machine
    old, new = ({e.span: (e.count, e.quartiles) for e in table.entries} for table in (before, table_of(run)))
    assert new[WHOLE][0] > 0 and new | {WHOLE: (0, None)} == old
    kept = (run / "latency.json").read_bytes()
    neighbour.kernels.clear()
    done("latency", "--run", run, "--retry")  # nothing to retry
    assert (run / "latency.json").read_bytes() == kept and neighbour.kernels == []


def test_a_table_that_gains_no_entry_stays_unchanged(run, neighbour):
    """A new table would learn from the plans that choose() has timed since, and another plan might be chosen."""
    done("compress", "--run", run, "--budget", "95%")  # 80% cannot be met without the rejected kernel
    records = [json.loads(line) for line in (run / "latency.jsonl").read_text().splitlines()[1:]]
    slower = next(record for record in records if record["key"].startswith("plan ") and "samples" in record)
    slower["samples"] = [2 * sample for sample in slower["samples"]]
    with (run / "latency.jsonl").open("a") as journal:  # more turns than before, so that the median changes
        journal.writelines(8 * [json.dumps(slower) + "\n"])
    kept = {name: (run / name).read_bytes() for name in ("latency.json", "plan.json")}
    neighbour.kernels.clear()
    for command in ("latency", "compress"):
        done(command, "--run", run, "--retry")
        assert 7 in neighbour.kernels
        assert kept == {name: (run / name).read_bytes() for name in kept}


def test_retry_is_in_the_help():
    for command in ("latency", "importance", "compress"):
        shown = " ".join(depthfold(command, "--help").stdout.replace("│", " ").split())
        assert "--retry" in shown
        assert "Retry what failed before: blocks that the runtime rejected, and importance trainings." in shown
