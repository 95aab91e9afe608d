"""A step's batch follows from the step alone: in the middle of an epoch, after a resume, for any number of processes
that read or train, from memory and from files."""

import gc
import multiprocessing
import os

import numpy as np
import pytest
import torch

from depthfold.errors import DataError, InvalidValue
from depthfold.tasks.batches import indices_of, uniform
from depthfold.tasks.classification import ClassificationTask
from depthfold.tasks.image_folder import Files
from depthfold.training.recipe import Recipe
from depthfold.training.task import Step
from layouts import labels, pictures, write_folder

EVERYTHING = dict(flip=True, randaugment=(1, 9))
STREAMED = dict(memory=0)  # bytes: nothing is held


def step(number, seed=1, rank=0, world=1, **recipe):
    return Step(number=number, seed=seed, recipe=Recipe(steps=100, **dict(batch=4) | recipe), rank=rank, world=world)


def in_memory(count=60, classes=3, **options):
    x, y = torch.from_numpy(pictures(count, side=16)), torch.from_numpy(labels(count, classes))
    return ClassificationTask.tensors(train=(x, y), **options)


@pytest.fixture
def root(tmp_path):
    write_folder(tmp_path)  # 3 classes of 8: 21 to train on and 3 held out
    return tmp_path


def from_files(root, workers=0, **options):
    return ClassificationTask.image_folder(root, **dict(size=16, workers=workers) | STREAMED | options)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_epoch_sees_every_image_once_but_for_the_rest():
    task = in_memory()
    assert task.steps_per_epoch(Recipe(epochs=1, batch=4)) == 13  # 54 images
    for epoch in (0, 3):
        seen = np.concatenate([indices_of(step(13 * epoch + n), 54) for n in range(13)])
        assert len(set(seen.tolist())) == 52
    first, again = (np.concatenate([indices_of(step(13 * e + n), 54) for n in range(13)]) for e in (0, 1))
    assert first.tolist() != again.tolist()
    assert first.tolist() != np.concatenate([indices_of(step(n, seed=2), 54) for n in range(13)]).tolist()


@pytest.mark.parametrize(("batch", "steps", "size"), [(53, 1, 53), (54, 1, 54), (55, 1, 54), (27, 2, 27), (28, 1, 28)])
def test_batches_at_the_edge(batch, steps, size):
    task = in_memory()
    assert task.steps_per_epoch(Recipe(epochs=1, batch=batch)) == steps
    assert len(task.batch(step(0, batch=batch))[1]) == size
    assert len(task.batch(step(7, batch=batch))[1]) == size


def test_labels_belong_to_their_images():
    x = torch.arange(60).view(60, 1, 1, 1).expand(60, 1, 4, 4).to(torch.uint8)
    y = torch.from_numpy(labels(60, 3).astype(np.int64))
    task = ClassificationTask.tensors(train=(x, y), normalise=((0.0,), (1.0,)))
    seen = set()
    for number in range(13):
        images, found = task.batch(step(number))
        which = (images[:, 0, 0, 0] * 255).round().long()
        assert torch.equal(y[which], found)
        seen |= {*which.tolist()}
    assert len(seen) == 52


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_the_order_in_which_steps_are_asked_for_does_not_matter(root, kind, crop):
    """After a resume, or in another process, a training starts in the middle."""

    def task():
        return in_memory() if kind == "memory" else from_files(root)

    straight, jumping = task(), task()
    asked = dict(crop=crop, erasing=0.5, **EVERYTHING)
    in_turn = [straight.batch(step(number, **asked)) for number in range(12)]
    for number in (7, 8, 9, 2, 11, 0, 1, 1, 5):
        assert same(jumping.batch(step(number, **asked)), in_turn[number]), number
        jumping.batch(step(number, seed=2, **asked))  # another training, in between
    assert not same(in_turn[0], straight.batch(step(0, seed=2, **asked)))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_reading_processes_does_not_matter(root, workers):
    """Over the end of an epoch, with a jump, from its files and with the same global random state."""
    asked = dict(crop="resized", **EVERYTHING)
    alone, helped = from_files(root), from_files(root, workers=workers)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for number in (3, 4, 5, 6, 1, 2):
        assert same(helped.batch(step(number, **asked)), alone.batch(step(number, **asked))), number
    assert torch.equal(torch.get_rng_state(), before)  # or dropout would depend on how data is read


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("batch", [6, 7])
def test_processes_that_train_share_a_batch(root, kind, batch):
    task = in_memory() if kind == "memory" else from_files(root)
    asked = dict(crop="resized", batch=batch, **EVERYTHING)
    for number in (0, 5):
        whole = task.batch(step(number, **asked))
        parts = [task.batch(step(number, rank=rank, world=3, **asked)) for rank in range(3)]
        assert [len(y) for _, y in parts] == ([2, 2, 2] if batch == 6 else [2, 2, 3])
        assert same(whole, [torch.cat(part) for part in zip(*parts, strict=True)])


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_what_was_asked_for_before_does_not_matter(root, kind):
    """The next step, but of another process, batch, training or crop: nothing that was read ahead is for it."""
    task = in_memory() if kind == "memory" else from_files(root)
    for other in (dict(rank=1), dict(world=4), dict(batch=6), dict(seed=2), dict(crop="resized")):
        asked = dict(rank=0, world=2, batch=8, seed=1, crop="none") | other
        fresh = (in_memory() if kind == "memory" else from_files(root)).batch(step(1, **asked))
        task.batch(step(0, rank=0, world=2, batch=8, crop="none"))
        assert same(task.batch(step(1, **asked)), fresh), other


def test_more_processes_than_images():
    with pytest.raises(InvalidValue, match=r"A batch of 4 images cannot be shared by 5 processes\. Use a larger"):
        in_memory().batch(step(0, rank=1, world=5))


def test_the_callers_autocast_does_not_reach_the_pixels(root):
    for task in (in_memory(size=24), from_files(root)):
        asked = dict(crop="resized", erasing=0.5, **EVERYTHING)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = task.batch(step(3, **asked))
        assert under[0].dtype == torch.float32
        assert same(under, task.batch(step(3, **asked)))


def test_random_parts_come_in_the_size_asked_for(root):
    for task in (in_memory(size=(24, 20)), from_files(root, size=(24, 20))):
        for crop in ("none", "pad", "resized"):
            assert task.batch(step(0, crop=crop))[0].shape == (4, 3, 24, 20)


def test_normalised_by_channel():
    x = torch.from_numpy(pictures(60, side=4))
    y = torch.from_numpy(labels(60, 3))
    task = ClassificationTask.tensors(train=(x, y), normalise=((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), holdout=0)
    found = task.batch(step(0, batch=60))[0]
    pixels = x[indices_of(step(0, batch=60), 60)].double() / 255
    for channel, (mean, deviation) in enumerate(((0.1, 0.5), (0.2, 0.6), (0.3, 0.7))):
        assert torch.allclose(found[:, channel].double(), (pixels[:, channel] - mean) / deviation, atol=1e-6)
    # By their own mean and deviation, if nobody says.
    own = ClassificationTask.tensors(train=(x, y), holdout=0).batch(step(0, batch=60))[0]
    assert own.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (own.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_channels_last():
    images, _ = in_memory().batch(step(0, channels_last=True))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, in_memory().batch(step(0))[0])


def test_a_file_that_cannot_be_read_fails_its_step_alone(root):
    """And says so again when it is asked for again."""
    task = from_files(root)
    task.steps_per_epoch(Recipe(epochs=1))
    good = [task.batch(step(number)) for number in range(5)]
    files = task._data.feed(cropped=False)._pictures
    bad = files.paths[int(indices_of(step(2), 21)[1])]
    os.truncate(bad, 60)
    again = from_files(root)
    assert same(again.batch(step(1)), good[1])
    for _ in range(2):
        with pytest.raises(DataError, match=f"The image {bad} cannot be read"):
            again.batch(step(2))
    assert same(again.batch(step(3)), good[3])


def test_a_process_that_may_have_no_children_reads_alone(root, monkeypatch):
    files = Files(paths=("a",), workers=2)
    assert files._processes() == 2
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert files._processes() == 0
    task = from_files(root, workers=2)
    assert same(task.batch(step(1)), from_files(root).batch(step(1)))


def test_uniform_numbers_are_of_the_whole_batch():
    whole = uniform(step(3), "x", 54, 5)
    assert whole.shape == (4, 5) and 0 <= whole.min() < whole.max() < 1
    assert np.array_equal(uniform(step(3, rank=1, world=2), "x", 54, 5), whole[2:])
    assert not np.array_equal(uniform(step(3), "y", 54, 5), whole)


def test_processes_that_read_end_with_their_task(root):
    """At once, by the last reference, and not when the garbage collector comes by."""
    gc.disable()
    try:
        before = {*multiprocessing.active_children()}
        task = from_files(root, workers=2)
        task.batch(step(0))
        started = {*multiprocessing.active_children()} - before
        assert len(started) == 2
        task.batch(step(9))  # a jump: others
        assert not started & {*multiprocessing.active_children()}
        del task
        assert {*multiprocessing.active_children()} <= before
    finally:
        gc.enable()
