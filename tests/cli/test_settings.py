"""Settings: parsed and checked, with all problems together; kept in and read from config.toml."""

import datetime
import inspect
import tempfile
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import depthfold as df
from cli_workshop import NET, depthfold, refused
from depthfold.errors import InvalidValue
from depthfold.jobs import InProcess, Processes, RayCluster
from depthfold.settings import Settings, gather, keep
from depthfold.settings.data import make_recipe
from depthfold.settings.executors import make_executor
from depthfold.training import Recipe, preset


def test_all_problems_are_reported_together(tmp_path):
    config = tmp_path / "bad.toml"
    config.write_text('bugdet = "60%"\ntarget = "onnxrutime"\nalpha = "much"\nexport = ["model.onx"]\ninput = "3x32"\n')
    said = refused("compress", "x.py:model", "--config", config, "--batch", "0", "--recipe", "quik", "--space", "wide")
    assert said.startswith("Error: 12 settings are missing or not valid:")
    for part in (
        "no setting 'bugdet'. Did you mean 'budget'?",
        "no backend 'onnxrutime'. Did you mean 'onnxruntime'?",
        "'alpha' must be a finite number",
        "'model.onx' cannot be exported",
        "'3x32' is not valid. Write channels x height x width",
        "'batch' must be an integer of at least 1",
        "no recipe 'quik'. Did you mean 'quick'?",
        "no search space 'wide'",
        "There is no run folder. Give one with --run DIR",
        "There is no data. Give it with --data",
        "There is no budget. Give the latency to reach",
        "there is no file",
    ):
        assert part in said


def test_settings_that_a_command_does_not_use_are_not_checked():
    table = {"model": "torchvision:resnet18", "data": "cifar10:/nowhere", "budget": "what?"}
    assert Settings.checked(table, needs=(), uses=("model",)).data == "cifar10:/nowhere"
    with pytest.raises(InvalidValue, match=r"2 settings are missing or not valid"):
        Settings.checked(table, needs=(), uses=("data", "budget"))


def test_paths_in_a_file_are_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/net.py").write_text("")
    (tmp_path / "deep/own.toml").write_text('model = "net.py:model"\nrun = "out"\nrecipe = "r.toml"\n')
    monkeypatch.chdir(tmp_path)
    settings = gather({"data": "imagefolder:deep"}, "deep/own.toml", needs=("model",), uses=("data",))
    assert settings.model == f"{tmp_path}/deep/net.py:model" and settings.run == f"{tmp_path}/deep/out"
    assert settings.recipe == f"{tmp_path}/deep/r.toml" and settings.data == f"imagefolder:{tmp_path}/deep"


def test_paths_in_config_toml_are_relative_to_the_run_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "net.py").write_text("")
    (tmp_path / "run/config.toml").write_text('model = "../net.py:model"\ndata = "imagefolder:."\n')
    monkeypatch.chdir("/")
    settings = gather({"run": str(tmp_path / "run")}, None, needs=("model",), uses=("data",))
    assert settings.model == f"{tmp_path}/run/../net.py:model" and settings.data == f"imagefolder:{tmp_path}/run"


def test_settings_of_other_commands_are_kept_unchanged(tmp_path):
    """The command that uses a setting reports what is wrong with it."""
    odd = "alpha = inf\nbudget = 2020-01-01\n[recipe.extra]\na = 1\n"
    (tmp_path / "odd.toml").write_text(odd)
    (tmp_path / "net.py").write_text(NET)
    told = (f"{tmp_path / 'net.py'}:model", "--input", "1x8x8", "--target", "cost_model")
    result = depthfold("latency", *told, "--config", tmp_path / "odd.toml", "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    kept = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert {key: kept[key] for key in ("alpha", "budget", "recipe")} == tomllib.loads(odd)
    assert "'alpha' must be a finite number" in refused("solve", "--run", tmp_path / "run")


PLAIN = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",))),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
)
KEYS = st.from_regex(r"[a-z]{1,8}", fullmatch=True) | st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@settings(max_examples=20)
@given(st.dictionaries(KEYS, NESTED))
def test_config_toml_reads_back_as_written(table):
    with tempfile.TemporaryDirectory() as run:
        keep(Settings(run=run, recipe=table))
        assert gather({"run": run}, None, needs=(), uses=()) == Settings(run=run, recipe=table)


def test_default_method_of_importance_is_the_same_everywhere_and_a_run_keeps_it(run):
    default = inspect.signature(df.measure_importance).parameters["method"].default
    assert default == df.Options().importance_method == Settings().method == "brief"
    assert "Default: brief." in " ".join(depthfold("importance", "--help").stdout.replace("│", " ").split())
    assert "; brief; Recipe(" in df.ImportanceTable.loads((run / "importance.json").read_text()).provenance
    assert tomllib.loads((run / "config.toml").read_text())["method"] == "brief"  # also if there is another default


@pytest.mark.parametrize(
    ("text", "executor"),
    [
        ("inline", InProcess()),
        ("inline:threads=2", InProcess(threads=2)),
        ("processes:2", Processes(workers=2)),
        ("processes:2,threads=1", Processes(workers=2, threads=1)),
        ("processes:devices=cuda:0+cuda:1", Processes(devices=("cuda:0", "cuda:1"))),
        ("ray:address=auto,gpus=0.25", RayCluster(address="auto", gpus=0.25)),
    ],
)
def test_executors_by_name(text, executor):
    assert make_executor(text) == executor


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("proceses:2", "There is no executor 'proceses'. Did you mean 'processes'?"),
        ("processes:two", "cannot read 'two'. Its options are workers, threads"),
        ("processes:workers=two", "must be a whole number, found 'two'"),
        ("processes:0", "The number of workers must be an integer of at least 1"),
        ("inline:2", "cannot read '2'"),
    ],
)
def test_wrong_executors_are_refused(text, said):
    with pytest.raises(InvalidValue, match=said):
        make_executor(text)


def test_recipes_by_name_by_file_and_by_table(tmp_path):
    assert make_recipe("quick") == preset("quick")
    assert make_recipe({"preset": "quick", "steps": 100}) == preset("quick").replace(steps=100)
    assert make_recipe({"epochs": 2, "randaugment": [2, 9]}) == Recipe(epochs=2, randaugment=(2, 9))
    (tmp_path / "a.toml").write_text("steps = 7\nlr = 0.2\n")
    (tmp_path / "b.json").write_text(Recipe(steps=7, lr=0.2).dumps())
    assert make_recipe(str(tmp_path / "a.toml")) == make_recipe(str(tmp_path / "b.json")) == Recipe(steps=7, lr=0.2)
    (tmp_path / "c.toml").write_text("steps = ")
    for given_, said in (
        (str(tmp_path / "c.toml"), "cannot be read"),
        ({"stesp": 7}, "unknown field 'stesp'"),
        ({"preset": "quick", "stesp": 7}, "Did you mean 'steps'"),
        (str(tmp_path / "none.json"), "No such file"),
    ):
        with pytest.raises(InvalidValue, match=said):
            make_recipe(given_)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.toml", 'preset = "quick"\nsteps = 7\nwarmup = 2\nrandaugment = [2, 9]\n'),
        ("own.json", preset("plans").dumps()),
    ],
)
def test_a_recipe_in_a_file_is_kept_with_the_run(tmp_path, monkeypatch, name, text):
    """Later changes of the file have no effect on the run until it is given again."""
    monkeypatch.chdir(tmp_path)
    run, file = str(tmp_path / "run"), tmp_path / name
    file.write_text(text)
    wanted = make_recipe(str(file))
    keep(gather({"run": run, "recipe": name, "importance_recipe": name}, None, needs=(), uses=("recipe",)))
    file.write_text(preset("quick").replace(steps=3, warmup=0).dumps() if name == "own.json" else "steps = 3")
    for _ in range(2):
        kept = gather({"run": run}, None, needs=(), uses=("recipe", "importance_recipe"))
        assert make_recipe(kept.recipe) == make_recipe(kept.importance_recipe) == wanted
        file.unlink(missing_ok=True)
    with pytest.raises(InvalidValue, match=rf"The recipe {file} cannot be read: No such file"):
        gather({"run": run, "recipe": name}, None, needs=(), uses=("recipe",))


@pytest.mark.parametrize("number", ["60", "0.6"])
def test_a_budget_without_a_unit_is_refused_and_the_units_are_shown(tmp_path, number):
    """60 might be meant in per cent, and 0.6 as a share or in milliseconds."""
    units = 'Write "12.5ms", "60%" of the original\'s latency, or "1.5x" as fast.'
    (tmp_path / "budget.toml").write_text(f"budget = {number}\n")
    for option in (("--budget", number), ("--config", tmp_path / "budget.toml")):
        said = refused("solve", "--run", tmp_path / "run", *option)
        assert "is not a number with a unit. " + units in said
