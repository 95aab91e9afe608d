"""measure_latency() in a process that is killed with SIGKILL, and then resumed."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

import depthfold as df
from depthfold.errors import JournalError

SCRIPT = textwrap.dedent(
    """
    import sys, time
    import torch
    from torch import nn
    import depthfold as df
    from depthfold.latency import Timer

    def layers(n):
        for _ in range(n):
            yield from (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    torch.manual_seed(0)
    network = df.trace(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), *layers(5)), torch.randn(1, 3, 16, 16))

    def progress(what, total, done):
        def step():
            if what.startswith("compiling"):
                return
            print("round", flush=True)
            time.sleep(float(sys.argv[2]))
        return step

    timer = Timer(warmup=0.0, round_seconds=0.0, samples=2, rounds=3, extra=0)
    table = df.measure_latency(
        network, "cost_model", run=sys.argv[1], timer=timer, networks=6, progress=progress
    )
    print(table.dumps(), flush=True)
    """
)


def start(run, pause):
    command = [sys.executable, "-c", SCRIPT, str(run), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(run):
    with start(run, 0.0) as process:
        text = process.stdout.read()
    assert process.returncode == 0
    _, _, table = text.rpartition("round\n")
    return df.LatencyTable.loads(table), text.count("round\n")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a measurement that is not killed, its table and its number of rounds."""
    run = tmp_path_factory.mktemp("whole")
    return run, *finish(run)


def rounds_in(journal):
    lines = journal.read_bytes().split(b"\n")[1:-1]
    return [line for line in lines if b"samples" in line]


def test_killed_measurement_loses_at_most_one_round_and_gives_the_same_table(tmp_path, whole):
    journal = tmp_path / "killed/latency.jsonl"
    reported = 0
    for rounds in (7, 25):
        process = start(journal.parent, 0.01)
        for _ in range(rounds):
            assert process.stdout.readline() == "round\n"
        process.send_signal(signal.SIGKILL)
        reported += rounds + process.stdout.read().count("round\n")
        process.wait()
        process.stdout.close()
        assert reported <= len(rounds_in(journal)) <= reported + 1  # the last round may be on disk but not reported
        reported = len(rounds_in(journal))
    table, rest = finish(journal.parent)
    _, right, all_rounds = whole
    assert table == right
    assert reported + rest == all_rounds == len(rounds_in(journal))


def test_incomplete_last_line_is_measured_again_and_a_damaged_line_is_an_error(tmp_path, whole):
    run, right, _ = whole
    journal = shutil.copytree(run, tmp_path / "torn") / "latency.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    table, again = finish(journal.parent)
    assert table == right and again == 1
    lines = journal.read_bytes().split(b"\n")
    lines[4] = lines[4][:-5]
    journal.write_bytes(b"\n".join(lines))
    from depthfold.store import Journal

    header = json.loads(lines[0])["header"]
    with pytest.raises(JournalError, match="line 5: expected a JSON object"):
        Journal(journal, header)
