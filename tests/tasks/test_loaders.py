"""Tasks made from DataLoaders: batches depend only on seed and step, and loaders that do not allow it are refused."""

import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import depthfold as df
from depthfold.errors import DataError, InvalidValue
from depthfold.training import Recipe, Step

RECIPE = Recipe(steps=4, batch=8, lr=0.05)


class Numbered(Dataset):
    """Images whose first pixel is their index, and whose others are noise from three global generators."""

    def __init__(self, number=40, first=0):
        self.number, self.first, self.read = number, first, []

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.read.append(index)
        image = torch.rand(1, 6, 6)
        image[0, 0] = self.first + index
        image[0, 1, 1] = random.random()
        image[0, 1, 2] = float(np.random.rand())
        return image, (self.first + index) % 4


def task(train=None, workers=0, **options):
    given = {"holdout": DataLoader(Numbered(12, first=100)), "test": DataLoader(Numbered(16, first=200)), **options}
    train = train if train is not None else DataLoader(Numbered(), batch_size=3, shuffle=True, num_workers=workers)
    return df.ClassificationTask.from_loaders(train=train, **given)


def step(number, **given):
    return Step(number=number, seed=7, recipe=RECIPE, **given)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
    )


def test_labels_belong_to_their_images():
    images, labels = task().batch(step(0))
    assert images.shape == (8, 1, 6, 6)  # the batch of the recipe, not of the loader
    assert torch.equal(images[:, 0, 0, 0].long() % 4, labels)


def test_epoch_has_every_item_once():
    made = task()
    seen = [int(value) for number in range(5) for value in made.batch(step(number))[0][:, 0, 0, 0]]
    assert sorted(seen) == list(range(40))
    assert made.steps_per_epoch(RECIPE) == 5


def test_batch_depends_only_on_seed_and_step():
    wanted = task().batch(step(3))
    made = task()
    for number in range(3):
        made.batch(step(number))
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    assert all(map(torch.equal, made.batch(step(3)), wanted))
    assert all(map(torch.equal, task(workers=1).batch(step(3)), wanted))  # in another process
    again = pickle.loads(pickle.dumps(made))
    assert all(map(torch.equal, again.batch(step(3)), wanted))


def test_transforms_differ_from_step_to_step():
    made = task()
    noise = {}
    for number in range(10):  # two epochs
        for image in made.batch(step(number))[0]:
            noise.setdefault(int(image[0, 0, 0]), []).append(image[0, 1:])
    for one, two in noise.values():
        for part in (slice(None), (0, 1), (0, 2)):  # of PyTorch, random and NumPy
            assert not torch.equal(one[part], two[part])


def test_processes_share_the_batch():
    whole = task().batch(step(2))[0]
    parts = [task().batch(step(2, rank=rank, world_size=2))[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), whole)


def test_global_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    task().batch(step(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_scores_are_those_of_the_loaders():
    made, model = task(), network().eval()
    images, labels = next(iter(DataLoader(Numbered(16, first=200), batch_size=16)))
    outputs = made.outputs(model, "test")
    assert (made.count("holdout"), made.count("test"), made.classes) == (12, 16, 4)
    assert outputs.shape == (16, 4)
    fixed = made._data.cached("test").images.pixels
    assert torch.equal(fixed[:, 0, 0, 0], images[:, 0, 0, 0])  # all items, in order
    assert torch.equal(outputs, model(fixed))
    assert made.score(model, "test") == 100 * (model(fixed).argmax(1) == labels).float().mean().item()


def test_items_to_score_are_read_once_beside_their_labels():
    dataset = Numbered(12, first=100)
    made, model = task(holdout=DataLoader(dataset)), network()
    assert made.count("holdout") == 12  # reads the labels
    dataset.read.clear()
    for _ in range(3):
        made.score(model, "holdout")
    assert [dataset.read.count(index) for index in range(1, 12)] == [1] * 11


def test_training_gives_the_same_weights_again(tmp_path):
    traced = df.trace(network(), torch.zeros(1, 1, 6, 6))
    student = df.rewrite(traced, traced.vanilla)
    one, two = (df.finetune(student, task(workers=workers), RECIPE, run=tmp_path / str(workers)) for workers in (0, 1))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(one.parameters()), next(student.parameters()))


def test_collate_function_is_used():
    def darker(items):
        images, labels = torch.utils.data.default_collate(items)
        return images - 1000, labels

    images, _ = task(DataLoader(Numbered(), collate_fn=darker)).batch(step(0))
    assert images[:, 0, 0, 0].max() <= -960


def test_subsets_of_a_dataset():
    sampler = SubsetRandomSampler([3, 9, 5, 30, 4, 14, 19, 20])
    images, _ = task(DataLoader(Numbered(), sampler=sampler)).batch(step(0))
    assert sorted(images[:, 0, 0, 0].tolist()) == [3, 4, 5, 9, 14, 19, 20, 30]
    images, _ = task(DataLoader(Subset(Numbered(), range(8, 16)))).batch(step(0))
    assert sorted(images[:, 0, 0, 0].tolist()) == list(range(8, 16))


def test_uint8_images_are_scaled():
    pixels, labels = torch.randint(256, (8, 3, 4, 4), dtype=torch.uint8), torch.arange(8) % 2
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=4)
    made = df.ClassificationTask.from_loaders(train=loader, holdout=loader)
    torch.testing.assert_close(made.example(), pixels[:1] / 255)
    normalised = df.ClassificationTask.from_loaders(train=loader, holdout=loader, normalise=((0.5,), (0.25,)))
    torch.testing.assert_close(normalised.example(), (pixels[:1] / 255 - 0.5) / 0.25)
    assert normalised.preprocessing.uint8


def test_names_of_the_classes():
    named = Numbered()
    named.classes = ["a", "b", "c", "d"]
    assert task(DataLoader(named)).preprocessing.classes == ("a", "b", "c", "d")
    assert task(DataLoader(named), classes=list("efgh")).preprocessing.classes == tuple("efgh")
    assert task().preprocessing.classes == ("0", "1", "2", "3")
    with pytest.raises(DataError, match=r"The train loader: the label of image 2 is 2, expected 0 to 1"):
        task(classes=["a", "b"]).batch(step(0))


def test_identity_changes_with_the_data():
    assert task().identity == task(workers=1).identity
    assert task().identity != task(DataLoader(Numbered(first=4))).identity
    assert task().identity != task(holdout=DataLoader(Numbered(8, first=100))).identity


class OwnGenerator(Numbered):
    """Images of which a generator of the dataset's own flips half, as in many libraries of transforms."""

    def __init__(self, labels=4, **given):
        super().__init__(**given)
        self.labels, self.generator = labels, np.random.default_rng()

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.flip(-1) if self.generator.random() < 0.5 else image, label % self.labels


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_generator_of_the_datasets_own_does_not_change_the_identity(workers):
    """With workers, each fetch sees the state that the generator had in this process."""
    one, two = (task(DataLoader(OwnGenerator(), num_workers=workers)).identity for _ in range(2))
    assert one == two
    assert one != task(DataLoader(OwnGenerator(labels=2), num_workers=workers)).identity
    assert one != task(DataLoader(OwnGenerator(number=36), num_workers=workers)).identity


def test_holdout_set_that_changes_is_refused():
    made = task(holdout=DataLoader(OwnGenerator()))
    with pytest.raises(DataError, match="The items of the holdout loader change when they are read again, so scores"):
        made.count("holdout")


def test_training_resumes_with_a_generator_of_the_datasets_own(tmp_path):
    traced = df.trace(network(), torch.zeros(1, 1, 6, 6))
    tables = [
        df.measure_importance(traced, task(DataLoader(OwnGenerator())), RECIPE, run=tmp_path / "run") for _ in range(2)
    ]
    assert tables[0] == tables[1]  # those of the journal


def test_identity_of_repeatable_data_stays_the_same():
    """A fixed expectation: if it changed with a version, run folders that exist could not be resumed."""
    numbers = torch.arange(300 * 3 * 4 * 4) % 251
    data = TensorDataset(numbers.to(torch.uint8).reshape(300, 3, 4, 4), torch.arange(300) % 7)
    made = df.ClassificationTask.from_loaders(train=DataLoader(data), holdout=DataLoader(Subset(data, range(20))))
    assert made.identity.startswith("300 images of a loader, 50fdd922fa4930bb, ")


class Items(Dataset):
    """A dataset of one item, as often as it is read."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if isinstance(self.item, Exception):
            raise self.item
        return self.item


@pytest.mark.parametrize(
    "item, message",
    [
        ({"image": torch.zeros(1, 4, 4), "label": 1}, "yields a dict with the keys image, label, expected"),
        (torch.zeros(1, 4, 4), r"yields a tensor of float32 of the shape \(8, 1, 4, 4\), expected \(images, labels\)"),
        (
            (torch.zeros(1, 4, 4), 0.5),
            r"yields \(a tensor of float32 of the shape \(8, 1, 4, 4\), a tensor of float64 of the shape \(8,\)\)",
        ),
        ((torch.zeros(4, 4), 1), r"float32 of the shape \(8, 4, 4\), a tensor of int64"),
        ((torch.zeros(1, 4, 4), 1, 1), r"a tensor of int64 of the shape \(8,\), a tensor of int64"),
        (("a name", 1), r"yields \(\(str, str.*\), a tensor of int64"),
        (
            OSError("cut short"),
            r"Item 0 of the train loader cannot be read: OSError: cut short\. Repair or remove it\.",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, id="in a worker")])
def test_other_batches_are_refused(item, message, workers):
    if workers and not isinstance(item, Exception):
        return  # one case is enough
    with pytest.raises(DataError, match=message):
        task(DataLoader(Items(item), num_workers=workers)).batch(step(0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "loader, message",
    [
        ([1, 2], r"train must be a torch\.utils\.data\.DataLoader, found list\. For images in memory"),
        (DataLoader(Stream()), "The train loader streams its data, so the batch of a step cannot be read again"),
        (
            DataLoader(Numbered(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
            "draws its items with WeightedRandomSampler, which depthfold cannot repeat",
        ),
        (
            DataLoader(Numbered(4), sampler=torch.utils.data.RandomSampler(Numbered(4), replacement=True)),
            "draws its items with RandomSampler",
        ),
        (DataLoader(Numbered(4), batch_size=None), r"makes its batches itself \(no batches\)"),
        (
            DataLoader(Numbered(4), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler([1]), 1, False)),
            r"makes its batches itself \(Own\)",
        ),
    ],
)
def test_loaders_that_cannot_be_read_again_are_refused(loader, message):
    with pytest.raises(InvalidValue, match=message):
        task(loader)


def test_functions_that_start_workers_are_said_not_to_be_called(recwarn):
    task(DataLoader(Numbered(), num_workers=1, worker_init_fn=print))
    (warning,) = recwarn
    assert str(warning.message) == (
        "The worker_init_fn of the train loader is not called. If it opens files, open them on first use in the "
        "dataset's __getitem__."
    )
    assert warning.filename == __file__
    task(DataLoader(Numbered(), worker_init_fn=print))  # without workers, the loader does not call it either
    assert len(recwarn) == 1


class InNewInterpreter(Numbered):
    """Images of class 1 if the items are read in a new interpreter, otherwise of class 0."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, int(multiprocessing.current_process().name.startswith("Spawn"))


@pytest.mark.parametrize("context", ["spawn", None])
def test_start_method_of_the_workers_is_that_of_the_loader(context):
    loader = DataLoader(InNewInterpreter(8), num_workers=1, multiprocessing_context=context)
    made = task(holdout=loader)
    made = pickle.loads(pickle.dumps(made))  # a context cannot be pickled
    assert made._data.scored("holdout").labels.unique().tolist() == [int(context == "spawn")]


def test_missing_parts_are_explained():
    with pytest.raises(DataError, match=r"This task has no test loader\. Pass test=\.\.\. to ClassificationTask\."):
        task(test=None).count("test")
    with pytest.raises(DataError, match=r"The holdout loader has no items\."):
        task(holdout=DataLoader(Numbered(0))).count("holdout")
    assert task().has_holdout
