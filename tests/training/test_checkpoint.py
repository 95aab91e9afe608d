"""A checkpoint file is whole or refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from depthfold.errors import CheckpointError
from depthfold.training.checkpoints import read_checkpoint, write_checkpoint
from depthfold.training.loop import train
from depthfold.training.recipe import Recipe
from small_training import TASK, SmallNet

TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "flag": torch.tensor([True, False]),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.safetensors"


def test_tensors_of_every_kind_come_back(path):
    write_checkpoint(path, '{"step": 1}', TENSORS)
    document, tensors = read_checkpoint(path)
    assert document == '{"step": 1}'
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_tensors_that_share_memory_or_are_not_contiguous_are_kept(path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "view": base[1:], "turned": base.t(), "again": base}
    write_checkpoint(path, "", tensors)
    _, found = read_checkpoint(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_cut_at_every_byte_it_is_refused(path):
    write_checkpoint(path, "{}", TENSORS)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"last.safetensors (cannot be read|is damaged): "):
            read_checkpoint(path)


def test_changed_at_any_byte_it_is_refused(path):
    write_checkpoint(path, '{"step": 1}', TENSORS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(bytes(changed))
        try:
            document, tensors = read_checkpoint(path)
        except CheckpointError as error:
            assert "last.safetensors" in str(error)
            continue
        # A space in the header's padding says nothing, and may change.
        assert document == '{"step": 1}'
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_somebody_elses_file_is_refused(path):
    save_file(TENSORS, path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert str(caught.value) == (
        f"{path} is not a checkpoint of depthfold: it holds only tensors. Restore it, or delete it to start again."
    )


@pytest.mark.parametrize("name", ["last.safetensors", "best.safetensors"])
def test_a_training_refuses_a_damaged_checkpoint(name, tmp_path):
    recipe = Recipe(steps=3, batch=4, keep="best")
    train(SmallNet(), TASK, recipe, folder=tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(bytes(data))
    with pytest.raises(CheckpointError) as caught:
        train(SmallNet(), TASK, recipe, folder=tmp_path)
    assert str(caught.value) == (
        f"The checkpoint {tmp_path / name} is damaged: its contents do not match their digest. Restore it, or delete "
        "it to start again."
    )


def test_a_document_of_another_kind_is_refused(tmp_path):
    write_checkpoint(tmp_path / "last.safetensors", '{"format": "x", "version": 1}', {})
    with pytest.raises(CheckpointError, match=r"cannot be read: This document has format 'x', version 1; State reads"):
        train(SmallNet(), TASK, Recipe(steps=3), folder=tmp_path)


def test_a_failed_write_leaves_the_file_before(path, monkeypatch):
    write_checkpoint(path, "one", TENSORS)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Input/output error. Check the folder"):
        write_checkpoint(path, "two", TENSORS)
    assert read_checkpoint(path)[0] == "one"
