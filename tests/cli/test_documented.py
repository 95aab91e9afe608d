"""The commands in the documents are commands, and a user's own file goes all the way through."""

import re
import shlex
from pathlib import Path

import pytest

import depthfold as df
from cli_workshop import depthfold
from depthfold.cli import options
from lacking import needs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("../README.md", "command-line.md", "demo.md", "own-model.md")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page):
    lines = "".join(blocks(page, "console")).splitlines()
    return [shlex.split(line.removeprefix("$ depthfold ")) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_has_these_options(page):
    assert commands(page)
    for arguments in commands(page):
        shown = depthfold(*arguments, "--help")  # a wrong option is refused even so
        assert shown.exit_code == 0 and "Usage: depthfold" in shown.stdout, arguments
    assert depthfold("solve", "--no-such-option", "--help").exit_code == 2


def test_an_option_states_its_name_where_its_metavar_is_the_same():
    """typer 0.27 takes the name of such an option from its metavar: --TARGET."""
    found = {n.lower(): o.__metadata__[0] for n, o in vars(options).items() if hasattr(o, "__metadata__")}
    same = [name for name, info in found.items() if name == (info.metavar or "").lower()]
    assert {"data", "space", "target", "budget", "executor", "recipe"} <= set(same)
    for name in same:
        assert f"--{name}" in (found[name].default, *found[name].param_decls)  # Annotated puts the first into default


@needs("plotly")
def test_a_users_own_file_goes_all_the_way(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(blocks("own-model.md", "python")[0])
    (tmp_path / "mine.toml").write_text(blocks("own-model.md", "toml")[0])
    monkeypatch.chdir(tmp_path)
    inspect, compress = commands("own-model.md")
    assert "Sequential: 4 layers, 4 activations" in depthfold(*inspect).stdout
    # Everything as on the page but for the stopwatch, which no test can rely on.
    done = depthfold(*compress, "--target", "cost_model")
    assert done.exit_code == 0, done.output
    findings = df.Findings.loads(Path("out/findings.json").read_text())
    assert findings.after.latency <= 0.9 * findings.before.latency
    assert findings.score_before.images == 80
    assert Path("out/report.html").stat().st_size > 100_000 and Path("out/model.onnx").exists()
