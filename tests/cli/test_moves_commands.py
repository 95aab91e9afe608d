"""Plans with dropped layers and branches, from the command line to the saved network."""

import shutil
import tomllib

import pytest
import torch

import depthfold as df
from cli_workshop import CONFIG, NET, depthfold, refused, without_memory
from depthfold.core import Drops, ImportanceTable, LatencyTable, SolvedPlan, Span
from depthfold.importance import importance_options
from depthfold.pipeline.artefacts import student_folder
from depthfold.settings import Session, Settings
from depthfold.store import RunFolder

MOVES = ("--moves", "merge", "--moves", "drop-layers", "--moves", "drop-branches")
TABLES = ("latency.json", "importance.json")
WEIGHTS = "result/model.safetensors"
RESIDUAL = """

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.last = nn.Sequential(*layer(1, 4)), nn.Sequential(*layer(4, 4))
        self.branch = nn.Sequential(*layer(4, 4), *layer(4, 4)[:2])
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.last(self.branch(x) + x))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a user's file, and the run `whole` that is compressed with all moves."""
    folder = tmp_path_factory.mktemp("moves")
    (folder / "net.py").write_text(NET + RESIDUAL)
    settings = CONFIG.replace("net.py:model", "net.py:Residual").replace('"80%"', '"70%"')
    (folder / "tiny.toml").write_text('method = "recalibrated"\n' + settings)
    with without_memory():
        done = depthfold("compress", "--config", folder / "tiny.toml", "--run", folder / "whole", *MOVES)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "whole", tmp_path / "run")


def read(run):
    kinds = (LatencyTable, ImportanceTable, SolvedPlan)
    return [kind.loads((run / name).read_text()) for kind, name in zip(kinds, (*TABLES, "plan.json"), strict=True)]


def session(folder):
    return Session(settings=Settings(model=f"{folder}/net.py:Residual", data=f"{folder}/net.py:data"))


def test_compress_drops_layers_and_saves_the_network(folder):
    latency, importance, plan = read(folder / "whole")
    assert latency.drops and plan.plan.dropped
    traced = session(folder).trace()
    moves = ("merge", "drop-layers", "drop-branches")
    assert {(entry.span, entry.dropped) for entry in importance.entries} == {*importance_options(traced, moves=moves)}
    assert any(entry.dropped.branches for entry in importance.entries if entry.samples)
    shallow = df.load(folder / "whole/result", session(folder).model, session(folder).inputs)
    convolutions = [module for module in shallow.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == sum(not segment.empty for segment in plan.segments) < traced.depth
    exported = torch.export.load(folder / "whole/model.pt2").module()
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(exported(x), shallow(x), rtol=1e-4, atol=1e-5)
    assert tomllib.loads((folder / "whole/config.toml").read_text())["moves"] == list(moves)


def test_single_stages_give_the_same_result(folder, tmp_path):
    run, told = tmp_path / "staged", ("--config", folder / "tiny.toml")
    for command in (("latency", *told, *MOVES), "importance", "solve", "finetune", "merge", "export", "report"):
        done = depthfold(*([command] if isinstance(command, str) else command), "--run", run)
        assert done.exit_code == 0, done.output
    assert read(run) == read(folder / "whole")
    assert (run / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()


def test_run_without_its_last_results_resumes(folder, run):
    """As if it had been killed while it measured importances."""
    for name in ("importance.json", "plan.json", "findings.json", WEIGHTS):
        (run / name).unlink()
    shutil.rmtree(run / "students")
    journal = run / "importance.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: len(lines) // 2]))
    done = depthfold("compress", "--run", run)
    assert done.exit_code == 0, done.output
    assert read(run) == read(folder / "whole")
    assert len(journal.read_text().splitlines()) == len(lines)
    assert (run / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()


def test_tables_of_other_moves_are_not_reused(run):
    lines = (run / "importance.jsonl").read_text()
    done = depthfold("compress", "--run", run, "--moves", "merge", "--budget", "95%")
    assert done.exit_code == 0, done.output
    latency, importance, plan = read(run)
    assert not latency.drops and not importance.drops and not plan.plan.dropped
    journal = (run / "importance.jsonl").read_text()
    assert journal.startswith(lines)  # the measurements themselves are reused
    assert depthfold("compress", "--run", run, *MOVES, "--budget", "70%").exit_code == 0
    assert all(table.drops for table in read(run)[:2])
    assert (run / "importance.jsonl").read_text() == journal


def test_students_of_plans_with_other_drops_have_their_own_folders(run):
    plans = [df.Plan((), (), dropped) for dropped in (Drops(), Drops([2]), Drops([3]), Drops(branches=[Span(1, 3)]))]
    assert len({student_folder(RunFolder.at(run), plan, "quick", distil=True) for plan in plans}) == 4


def test_wrong_moves_are_refused(folder, run, tmp_path):
    new = ("--config", folder / "tiny.toml", "--run", tmp_path / "new")
    assert "There is no move 'drop-layer'. Did you mean 'drop-layers'?" in refused(
        "latency", *new, "--moves", "merge", "--moves", "drop-layer"
    )
    assert not (tmp_path / "new").exists()
    assert depthfold("latency", "--run", run, "--moves", "merge").exit_code == 0
    text = refused("importance", "--run", run, *MOVES)
    assert "The latency table has no entry for" in text and "depthfold latency --moves" in text


def test_given_table_must_have_the_drops_of_the_moves(folder, run, tmp_path):
    table = run / "importance.json"
    new = ("--config", folder / "tiny.toml", "--run", tmp_path / "new", "--importance")
    text = refused("compress", *new, table)
    assert "has entries with dropped layers, but the moves are merge. Add drop-layers to the moves (--moves" in text
    with_drops = ImportanceTable.loads(table.read_text())
    plain = ImportanceTable(
        entries=tuple(entry for entry in with_drops.entries if not entry.dropped), fingerprint=with_drops.fingerprint
    )
    (tmp_path / "plain.json").write_text(plain.dumps())
    text = refused("importance", *new, tmp_path / "plain.json", *MOVES)
    assert "has no entry with dropped layers, which the move drop-layers asks for. Measure one with" in text
    assert not (tmp_path / "new/importance.json").exists()
