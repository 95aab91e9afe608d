"""Files that are complete or not there at all."""

from pathlib import Path

import pytest

from depthfold.store.files import put_all_in_place


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_all_files_take_their_places(tmp_path):
    with put_all_in_place(tmp_path / "new" / "main.txt") as main:
        assert main.name == "main.txt"
        main.write_text("main")
        main.with_name("other.bin").write_text("other")
        assert not (tmp_path / "new" / "main.txt").exists()
    assert names(tmp_path / "new") == ["main.txt", "other.bin"]
    assert (tmp_path / "new" / "other.bin").read_text() == "other"


def test_an_error_leaves_what_was_there(tmp_path):
    (tmp_path / "main.txt").write_text("before")
    with pytest.raises(ZeroDivisionError), put_all_in_place(tmp_path / "main.txt") as main:
        main.write_text("half of")
        raise ZeroDivisionError
    assert names(tmp_path) == ["main.txt"]
    assert (tmp_path / "main.txt").read_text() == "before"


def test_what_a_killed_writer_left_is_taken_away(tmp_path):
    (tmp_path / ".main.txt.partial").mkdir()
    (tmp_path / ".main.txt.partial" / "old").write_text("")
    with put_all_in_place(tmp_path / "main.txt") as main:
        main.write_text("new")
    assert names(tmp_path) == ["main.txt"]


def test_the_file_that_is_asked_for_comes_last(tmp_path, monkeypatch):
    """Whoever sees it may take it that the others are there."""
    placed, replace = [], Path.replace

    def spy(path, target):
        placed.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", spy)
    with put_all_in_place(tmp_path / "m.txt") as main:
        for name in ("m.txt", "a.bin", "z.bin"):
            main.with_name(name).write_text(name)
    assert sorted(placed[:2]) == ["a.bin", "z.bin"]
    assert placed[2] == "m.txt"
