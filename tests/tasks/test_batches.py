"""The batch of a step depends only on the step: after resuming, for any number of processes, in memory and in files."""

import gc
import multiprocessing
import os

import numpy as np
import pytest
import torch

from depthfold.errors import DataError, InvalidValue
from depthfold.tasks import ClassificationTask
from depthfold.tasks.batches import batch_indices, uniform
from depthfold.tasks.image_folder import FileImages
from depthfold.training import Recipe, Step
from layouts import labels, pictures, write_folder

EVERYTHING = dict(flip=True, randaugment=(1, 9))
STREAMED = dict(memory=0)  # nothing is kept in memory


def step(number, seed=1, rank=0, world_size=1, **recipe):
    recipe = Recipe(steps=100, **dict(batch=4) | recipe)
    return Step(number=number, seed=seed, recipe=recipe, rank=rank, world_size=world_size)


def in_memory(count=60, classes=3, **options):
    x, y = torch.from_numpy(pictures(count, side=16)), torch.from_numpy(labels(count, classes))
    return ClassificationTask.tensors(train=(x, y), **options)


@pytest.fixture
def root(tmp_path):
    write_folder(tmp_path)  # 3 classes of 8 images: 21 to train on, 3 held out
    return tmp_path


def from_files(root, workers=0, **options):
    return ClassificationTask.image_folder(root, **dict(size=16, workers=workers) | STREAMED | options)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_epoch_has_each_image_once_except_the_dropped_rest():
    task = in_memory()
    assert task.steps_per_epoch(Recipe(epochs=1, batch=4)) == 13  # 54 images
    for epoch in (0, 3):
        seen = np.concatenate([batch_indices(step(13 * epoch + n), 54) for n in range(13)])
        assert len(set(seen.tolist())) == 52
    first, again = (np.concatenate([batch_indices(step(13 * e + n), 54) for n in range(13)]) for e in (0, 1))
    assert first.tolist() != again.tolist()
    assert first.tolist() != np.concatenate([batch_indices(step(n, seed=2), 54) for n in range(13)]).tolist()


@pytest.mark.parametrize(("batch", "steps", "size"), [(53, 1, 53), (54, 1, 54), (55, 1, 54), (27, 2, 27), (28, 1, 28)])
def test_batch_sizes_near_the_size_of_the_training_set(batch, steps, size):
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
def test_steps_can_be_requested_in_any_order(root, kind, crop):
    def task():
        return in_memory() if kind == "memory" else from_files(root)

    straight, jumping = task(), task()
    asked = dict(crop=crop, erasing=0.5, **EVERYTHING)
    in_turn = [straight.batch(step(number, **asked)) for number in range(12)]
    for number in (7, 8, 9, 2, 11, 0, 1, 1, 5):
        assert same(jumping.batch(step(number, **asked)), in_turn[number]), number
        jumping.batch(step(number, seed=2, **asked))  # another training in between
    assert not same(in_turn[0], straight.batch(step(0, seed=2, **asked)))


@pytest.mark.parametrize("workers", [1, 2])
def test_number_of_reading_processes_does_not_matter(root, workers):
    """The steps cross the end of an epoch and include a jump; the global random state is not changed."""
    asked = dict(crop="resized", **EVERYTHING)
    alone, helped = from_files(root), from_files(root, workers=workers)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for number in (3, 4, 5, 6, 1, 2):
        assert same(helped.batch(step(number, **asked)), alone.batch(step(number, **asked))), number
    assert torch.equal(torch.get_rng_state(), before)  # otherwise dropout would depend on how data is read


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("batch", [6, 7])
def test_training_processes_share_a_batch(root, kind, batch):
    task = in_memory() if kind == "memory" else from_files(root)
    asked = dict(crop="resized", batch=batch, **EVERYTHING)
    for number in (0, 5):
        whole = task.batch(step(number, **asked))
        parts = [task.batch(step(number, rank=rank, world_size=3, **asked)) for rank in range(3)]
        assert [len(y) for _, y in parts] == ([2, 2, 2] if batch == 6 else [2, 2, 3])
        assert same(whole, [torch.cat(part) for part in zip(*parts, strict=True)])


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_earlier_requests_do_not_matter(root, kind):
    """A batch that was read ahead is not used for another rank, world size, batch, seed or crop."""
    task = in_memory() if kind == "memory" else from_files(root)
    for other in (dict(rank=1), dict(world_size=4), dict(batch=6), dict(seed=2), dict(crop="resized")):
        asked = dict(rank=0, world_size=2, batch=8, seed=1, crop="none") | other
        fresh = (in_memory() if kind == "memory" else from_files(root)).batch(step(1, **asked))
        task.batch(step(0, rank=0, world_size=2, batch=8, crop="none"))
        assert same(task.batch(step(1, **asked)), fresh), other


def test_more_processes_than_images_are_refused():
    with pytest.raises(InvalidValue, match=r"A batch of 4 images cannot be shared by 5 processes\. Use a larger"):
        in_memory().batch(step(0, rank=1, world_size=5))


def test_autocast_does_not_change_the_batch(root):
    for task in (in_memory(size=24), from_files(root)):
        asked = dict(crop="resized", erasing=0.5, **EVERYTHING)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = task.batch(step(3, **asked))
        assert under[0].dtype == torch.float32
        assert same(under, task.batch(step(3, **asked)))


def test_batches_have_the_requested_size(root):
    for task in (in_memory(size=(24, 20)), from_files(root, size=(24, 20))):
        for crop in ("none", "pad", "resized"):
            assert task.batch(step(0, crop=crop))[0].shape == (4, 3, 24, 20)


def test_images_are_normalised_by_channel():
    x = torch.from_numpy(pictures(60, side=4))
    y = torch.from_numpy(labels(60, 3))
    task = ClassificationTask.tensors(train=(x, y), normalise=((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), holdout=0)
    found = task.batch(step(0, batch=60))[0]
    pixels = x[batch_indices(step(0, batch=60), 60)].double() / 255
    for channel, (mean, deviation) in enumerate(((0.1, 0.5), (0.2, 0.6), (0.3, 0.7))):
        assert torch.allclose(found[:, channel].double(), (pixels[:, channel] - mean) / deviation, atol=1e-6)
    # By default, they are normalised by their own mean and standard deviation.
    own = ClassificationTask.tensors(train=(x, y), holdout=0).batch(step(0, batch=60))[0]
    assert own.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (own.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_channels_last_batch():
    images, _ = in_memory().batch(step(0, channels_last=True))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, in_memory().batch(step(0))[0])


def test_unreadable_file_fails_only_its_step(root):
    task = from_files(root)
    task.steps_per_epoch(Recipe(epochs=1))
    good = [task.batch(step(number)) for number in range(5)]
    files = task._data.reader(cropped=False)._images
    bad = files.paths[int(batch_indices(step(2), 21)[1])]
    os.truncate(bad, 60)
    again = from_files(root)
    assert same(again.batch(step(1)), good[1])
    for _ in range(2):
        with pytest.raises(DataError, match=f"The image {bad} cannot be read"):
            again.batch(step(2))
    assert same(again.batch(step(3)), good[3])


def test_daemon_process_reads_without_workers(root, monkeypatch):
    files = FileImages(paths=("a",), workers=2)
    assert files._processes() == 2
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    assert files._processes() == 0
    task = from_files(root, workers=2)
    assert same(task.batch(step(1)), from_files(root).batch(step(1)))


def test_uniform_numbers_are_drawn_for_the_whole_batch():
    whole = uniform(step(3), "x", 54, 5)
    assert whole.shape == (4, 5) and 0 <= whole.min() < whole.max() < 1
    assert np.array_equal(uniform(step(3, rank=1, world_size=2), "x", 54, 5), whole[2:])
    assert not np.array_equal(uniform(step(3), "y", 54, 5), whole)


def test_reading_processes_end_with_their_task(root):
    """They end when the last reference is gone, without garbage collection."""
    gc.disable()
    try:
        before = {*multiprocessing.active_children()}
        task = from_files(root, workers=2)
        task.batch(step(0))
        started = {*multiprocessing.active_children()} - before
        assert len(started) == 2
        task.batch(step(9))  # a jump starts new processes
        assert not started & {*multiprocessing.active_children()}
        del task
        assert {*multiprocessing.active_children()} <= before
    finally:
        gc.enable()
