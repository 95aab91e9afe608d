"""Output to a terminal or pipe that cannot encode all characters."""

import io
import sys

import pytest

from depthfold import cli


@pytest.fixture
def printed(monkeypatch):
    """Return the bytes that the console script prints to a stdout of some encoding."""

    def command(encoding, *arguments):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(cli.terminal, "exit_on_interrupt", lambda: None)  # leave pytest's signal handler
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "argv", ["depthfold", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                cli.main()
        assert ended.value.code == 0
        return stdout.buffer.getvalue()

    return command


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "?"), ("latin-1", "±"), ("utf-8", "±")])
def test_summary_in_any_encoding(encoding, sign, run, printed):
    shown = printed(encoding, "compress", "--run", run).decode(encoding)
    (row,) = (line for line in shown.splitlines() if "accuracy" in line)
    assert row.count(f"% {sign} ") == 2
    assert "x as fast" in shown and "report.html" in shown


def test_characters_that_cannot_be_encoded_are_replaced(workshop, tmp_path, printed):
    net = tmp_path / "net.py"
    net.write_text((workshop / "net.py").read_text() + "\n\nclass Bäume(nn.Sequential): ...\n\n\n"
                   "def trees():\n    return Bäume(*model())\n")  # fmt: skip
    asked = ("inspect", f"{net}:trees", "--input", "1x8x8")
    assert printed("ascii", *asked).startswith(b"B?ume: 3 layers")
    assert printed("utf-8", *asked).decode().startswith("Bäume: 3 layers")


def test_help_in_ascii(printed):
    assert b"Example: depthfold compress" in b" ".join(printed("ascii", "compress", "--help").split())
