"""The commands in the documents exist, and the user's own file in them can be compressed."""

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer

import depthfold as df
from cli_workshop import NET, depthfold
from depthfold.cli.commands import app
from depthfold.settings import declarations

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("../README.md", "command-line.md", "demo.md", "own-model.md")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page):
    lines = "".join(blocks(page, "console")).replace("\\\n", "").splitlines()
    return [shlex.split(line.removeprefix("$ depthfold ")) for line in lines]


def test_no_text_advises_to_install_depthfold_from_the_index():
    """depthfold is not on the index, where anybody could take its name."""
    root = DOCS.parent
    files = [root / "README.md", *DOCS.rglob("*.md"), *(root / "examples").iterdir(), *(root / "src").rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    assert sum("pip install" in text for text in texts.values()) > 5
    wrong = re.compile(r"pip install (?!-)[^\n`]*\bdepthfold\b(?!\.)")
    assert [(file.name, found[0]) for file, text in texts.items() if (found := wrong.search(text))] == []


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_and_options_exist(page):
    assert commands(page)
    for arguments in commands(page):
        shown = depthfold(*arguments, "--help")  # a wrong option is refused also with --help
        assert shown.exit_code == 0 and "Usage: depthfold" in shown.stdout, arguments
    assert depthfold("solve", "--no-such-option", "--help").exit_code == 2


def test_every_setting_is_an_option_of_compress_under_its_own_name():
    """typer 0.27 would name an option after its metavar: --TARGET."""
    command = typer.main.get_command(app).commands["compress"]
    options = {parameter.name: parameter.opts + parameter.secondary_opts for parameter in command.params}
    for name, declared in declarations().items():
        option = f"--{name.replace('_', '-')}"
        wanted = [option, f"--no-{option[2:]}"] if declared.type in (bool, bool | None) else [option]
        assert options[name] == (["model"] if name == "model" else wanted)


def test_every_setting_is_documented():
    page = (DOCS / "command-line.md").read_text()
    for name in declarations():
        assert re.search(rf"--(no-)?{name.replace('_', '-')}\b|\*\*{name.capitalize()}:", page), name


def test_every_command_is_in_the_table():
    table = re.findall(r"^\| `(\w+)` \|", (DOCS / "command-line.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(typer.main.get_command(app).commands.keys() - {"demo"})  # demo.md has its own page


def test_a_documented_user_file_can_be_compressed(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(blocks("own-model.md", "python")[0])
    (tmp_path / "mine.toml").write_text(blocks("own-model.md", "toml")[0])
    monkeypatch.chdir(tmp_path)
    runpy.run_path("mine.py", run_name="__main__")  # as `python mine.py` does: it trains the network
    _, inspect, compress, *_ = commands("own-model.md")  # the first needs a folder of images
    assert "Sequential: 4 layers, 4 activations" in depthfold(*inspect).stdout
    # As on the page, except for the target: tests do not depend on measured latencies.
    done = depthfold(*compress, "--target", "cost_model")
    assert done.exit_code == 0, done.output
    assert "By these importances" not in done.stderr
    findings = df.Findings.loads(Path("out/findings.json").read_text())
    assert findings.after.latency <= 0.9 * findings.before.latency
    assert findings.score_before.images == 400
    assert findings.score_before.score > 0.95 and findings.score_after.score > 0.95  # a guess is right in 25 %
    assert Path("out/report.html").stat().st_size > 40_000 and Path("out/model.onnx").exists()


def test_documented_commands_measure_on_one_machine_and_train_on_another(tmp_path, monkeypatch):
    """Each machine has only its own folder while it works."""
    device, server = tmp_path / "device", tmp_path / "server"
    device.mkdir()
    (device / "net.py").write_text(NET)
    torch.save(runpy.run_path(str(device / "net.py"))["model"]().state_dict(), device / "mine.pt")
    (device / "few.toml").write_text("steps = 3\nbatch = 8\n")
    shutil.copytree(device, server)
    own = {
        "mine.py:network": ["net.py:model"],
        "imagefolder:photos": ["net.py:data"],
        "3x224x224": ["1x8x8"],
        "onnxruntime": ["cost_model"],
        "75%": ["80%"],
        "model.onnx": ["model.pt2"],
        "importance": ["importance", "--importance-recipe", "few.toml"],
        "finetune": ["finetune", "--recipe", "few.toml"],
    }
    steps = [step for step in commands("own-model.md") if "--run" in step and step[0] != "compress"]
    trains = {"importance", "finetune", "merge", "export", "report"}
    assert {step[0] for step in steps} == {*trains, "latency", "solve", "profile"}
    here = device
    for step in steps:
        there, here = here, server if step[0] in trains else device
        if there != here and (there / "out").exists():
            shutil.copytree(there / "out", here / "out", dirs_exist_ok=True)
        away = there.rename(tmp_path / "switched off") if there != here else None
        monkeypatch.chdir(here)
        done = depthfold(*(argument for each in step for argument in own.get(each, [each])))
        assert done.exit_code == 0, (step, done.output)
        if away:
            away.rename(there)
    assert "times as fast" in done.stdout
