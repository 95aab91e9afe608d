"""Ctrl-C while the command starts: the same line and exit code as later, and no traceback."""

import subprocess
import sys

import pytest

# The command line in a process that interrupts itself before it imports a certain module. The name "get_command"
# stands for the moment when typer starts.
SCRIPT = """
import os, signal, sys
name = sys.argv[1]

def strike():
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, module, path=None, target=None):
        if module == name:
            strike()

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, getattr(signal, sys.argv[2]))
if name == "get_command":
    import typer.main
    get_command = typer.main.get_command
    typer.main.get_command = lambda *given: (strike(), get_command(*given))[1]
from depthfold.cli import main
sys.argv = ["depthfold", *sys.argv[3:]]
main()
"""
LINE = "Interrupted: run the same command again to resume.\n"


def start(name, handler, *arguments):
    command = [sys.executable, "-c", SCRIPT, name, handler, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name",
    [
        "typer",
        "get_command",
        "numpy.exceptions",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("depthfold.cli.app", "torch")),
        "depthfold.settings.session",
    ],
)
def test_interruption_during_imports(name, workshop):
    """numpy.exceptions is imported by NumPy's C code, which replaces any exception by its own."""
    done = start(name, "default_int_handler", "inspect", f"{workshop / 'net.py'}:model", "--input", "1x8x8")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LINE)


def test_the_package_runs_like_the_console_script():
    command = [sys.executable, "-m", "depthfold", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("depthfold ")


def test_an_ignored_sigint_stays_ignored():
    done = start("typer", "SIG_IGN", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("depthfold ")
