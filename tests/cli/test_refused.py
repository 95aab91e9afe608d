"""A command that fails leaves the run unchanged: no settings, no table, no file."""

import json
import sys
import tomllib

import pytest

from cli_workshop import depthfold, refused
from depthfold.core import ImportanceTable


def done(*arguments):
    result = depthfold(*arguments)
    assert result.exit_code == 0, result.output
    return result


def kept(run):
    return tomllib.loads((run / "config.toml").read_text())


@pytest.fixture
def tables(run, workshop, tmp_path):
    """Return a folder with two importance tables: other.json of another network, and fits.json of this one.

    Its recipe, long.toml, has a longer warm-up than training.
    """
    other = done("inspect", f"{workshop / 'net.py'}:other", "--input", "1x8x8", "--json").stdout
    table = ImportanceTable.loads((run / "importance.json").read_text()).to_json()
    (tmp_path / "fits.json").write_text(json.dumps(table | {"provenance": "given", "base": table["base"] + 1}))
    short = [entry for entry in table["entries"] if entry["span"]["j"] <= len(json.loads(other)["layers"])]
    (tmp_path / "long.toml").write_text("epochs = 1\nbatch = 8\nwarmup = 100\n")
    (tmp_path / "other.json").write_text(json.dumps(table | {"entries": short, "fingerprint": "0" * 16}))
    return tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        ("--submodule", "nope"),
        ("--ignore", "nope"),
        ("--importance", "{tables}/other.json"),
        ("--data", "{net}:broken"),
        ("--alpha", "1.4", "--surrogate"),
        ("--alpha", "-1.4"),
        ("--method", "brief", "--reinit"),
        ("--recipe", "{tables}/long.toml"),
    ],
)
def test_a_refused_first_compress_leaves_nothing_behind(wrong, workshop, tables, tmp_path):
    run, again = tmp_path / "new", ("compress", "--config", workshop / "tiny.toml", "--run", tmp_path / "new")
    refused(*again, *(text.format(tables=tables, net=workshop / "net.py") for text in wrong))
    assert not run.exists() or not list(run.iterdir())
    done(*again)
    assert (
        "submodule" not in kept(run)
        and kept(run)["ignore"] == []
        and not {"importance", "alpha", "reinit"} & set(kept(run))
    )


@pytest.mark.parametrize("precision", ["half", "double"])
def test_a_model_that_is_not_in_float32(precision, workshop, tmp_path):
    text = f"def other():\n    return model().{precision}()\n"
    (tmp_path / "net.py").write_text(f"{(workshop / 'net.py').read_text()}\n\n{text}")
    said = refused("inspect", f"{tmp_path / 'net.py'}:other", "--input", "1x8x8")
    assert (
        f"has weights in torch.float{dict(half=16, double=64)[precision]}, and commands work in float32. Call" in said
    )


def test_a_first_compress_without_its_libraries_leaves_nothing_behind(workshop, tmp_path, monkeypatch):
    asked = ("compress", "--config", workshop / "tiny.toml", "--run", tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)
        refused(*asked, "--export", "model.onnx")
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


def test_a_refused_first_importance_leaves_nothing_behind(workshop, tables, tmp_path):
    asked = ("importance", "--config", workshop / "tiny.toml", "--run", tmp_path / "new")
    refused(*asked, "--importance", tables / "other.json")
    refused(*asked, "--data", f"{workshop / 'net.py'}:broken")
    refused(*asked, "--method", "brief", "--reinit")
    assert not list((tmp_path / "new").iterdir())


def test_an_interrupted_compress_resumes_with_the_run_alone(workshop, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    run = tmp_path / "new"
    monkeypatch.setattr("depthfold.pipeline.artefacts.measure_latency", interrupted)
    assert depthfold("compress", "--config", workshop / "tiny.toml", "--run", run).exit_code == 130
    monkeypatch.undo()
    done("compress", "--run", run)


@pytest.mark.parametrize("command", ["compress", "solve", "importance"])
def test_a_refused_importance_table_does_not_replace_the_runs_own(command, run, tables):
    own = (run / "importance.json").read_bytes()
    assert "is not of the network" in refused(command, "--run", run, "--importance", tables / "other.json")
    assert (run / "importance.json").read_bytes() == own
    done("solve", "--run", run)


@pytest.mark.parametrize("command", ["compress", "solve"])
def test_a_valid_importance_table_does_not_replace_the_runs_own_if_the_command_fails(command, run, tables):
    own = (run / "importance.json").read_bytes()
    refused(command, "--run", run, "--importance", tables / "fits.json", "--budget", "1%")
    assert (run / "importance.json").read_bytes() == own and "importance" not in kept(run)
    done(command, "--run", run, "--importance", tables / "fits.json")
    assert json.loads((run / "importance.json").read_text())["provenance"] == "given"
    assert kept(run)["importance"] == str(tables / "fits.json")


@pytest.mark.parametrize("command", [("inspect",), ("profile", "--target", "cost_model")])
def test_commands_that_only_read_create_no_run(command, workshop, tmp_path):
    asked = (*command, f"{workshop / 'net.py'}:model", "--input", "1x8x8", "--run")
    done(*asked, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    done(*asked, tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_inspect_refuses_the_run_of_another_network(workshop, run):
    said = refused("inspect", f"{workshop / 'net.py'}:other", "--input", "1x8x8", "--run", run)
    assert "belongs to another network" in said


@pytest.mark.parametrize("command", ["compress", "latency", "inspect", "profile", "report", "demo"])
def test_an_empty_run_name_is_not_the_current_folder(command, workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = () if command == "demo" else ("--config", workshop / "tiny.toml")
    for name in ("", " "):
        assert "The run folder has an empty name. Name one with --run DIR" in refused(command, *config, "--run", name)
    assert not list(tmp_path.iterdir())
