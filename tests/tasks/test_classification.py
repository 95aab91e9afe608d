"""The classification task: its loss, its score, and how it travels."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import nn

from depthfold.errors import DataError, InvalidValue
from depthfold.tasks.classification import ClassificationTask, main_output
from depthfold.training.recipe import Recipe
from depthfold.training.task import Step, Task
from layouts import labels, pictures, write_cifar10, write_cifar100, write_fashion_mnist, write_folder


def data(count=60, classes=3, seed=0):
    return torch.from_numpy(pictures(count, side=8, seed=seed)), torch.from_numpy(labels(count, classes, seed=seed))


def linear(classes=3, inputs=192):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def step(teacher=None, **recipe):
    return Step(number=2, seed=1, recipe=Recipe(steps=9, batch=5, **recipe), teacher=teacher)


def softmax(values):
    top = [math.exp(value - max(values)) for value in values]
    return [value / sum(top) for value in top]


class Knows(nn.Module):
    """Answers by the first pixel, which the data of the test makes the class."""

    def __init__(self, classes=3):
        super().__init__()
        self.classes, self.seen = classes, []
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, images):
        self.seen.append((tuple(images.shape), images.dtype))
        label = (images[:, 0, 0, 0] * 255).round().long()
        return nn.functional.one_hot(label, self.classes).to(images.dtype)


def telling(count=60, wrong=0):
    """Images whose first pixel is their label, but for `wrong` of them."""
    x, y = data(count)
    x[:, 0, 0, 0] = y
    x[:wrong, 0, 0, 0] = (y[:wrong] + 1) % 3
    return x, y


PLAIN = ((0.0,), (1.0,))


def test_it_is_a_task():
    assert isinstance(ClassificationTask.tensors(train=data()), Task)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_by_hand(smoothing):
    task, model = ClassificationTask.tensors(train=data()), linear()
    images, y = task.batch(step())
    expected = 0.0
    for scores, label in zip(model(images).tolist(), y.tolist(), strict=True):
        shares = [math.log(p) for p in softmax(scores)]
        expected -= (1 - smoothing) * shares[label] + smoothing * sum(shares) / 3
    loss = task.loss(model, step(label_smoothing=smoothing))
    assert loss.item() == pytest.approx(expected / 5, rel=1e-5)
    loss.backward()
    assert model[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.3), (4.0, 0.3), (2.0, 1.0), (2.0, 0.0)])
def test_distillation_by_hand(temperature, share):
    task, model = ClassificationTask.tensors(train=data()), linear()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    images, y = task.batch(step())
    expected = 0.0
    for scores, taught, label in zip(model(images).tolist(), teacher(images).tolist(), y.tolist(), strict=True):
        soft = zip(softmax([t / temperature for t in taught]), softmax([s / temperature for s in scores]), strict=True)
        expected -= share * temperature**2 * sum(t * math.log(s) for t, s in soft)
        expected -= (1 - share) * math.log(softmax(scores)[label])
    asked = step(teacher, distillation=share, temperature=temperature, label_smoothing=0.2)  # which is then not used
    loss = task.loss(model, asked)
    assert loss.item() == pytest.approx(expected / 5, rel=1e-5)
    loss.backward()
    assert teacher[1].weight.grad is None


def test_the_output_that_counts():
    main, other = torch.zeros(1, 2), torch.ones(1, 2)
    for output in (
        main,
        (main, other),
        [main, other],
        {"aux": other, "out": main},
        {"aux": other, "logits": main, "out": other},
        OrderedDict(first=main, second=other),
        SimpleNamespace(logits=main, loss=other),
        SimpleNamespace(logits=None, out=main),
        ((main, other), other),
    ):
        assert main_output(output) is main
    for output in (None, 3, (), {}, "text", SimpleNamespace(loss=other)):
        with pytest.raises(DataError, match=rf"The model returned {type(output).__name__}, expected a tensor, or some"):
            main_output(output)


def test_models_with_further_outputs_are_trained_and_scored():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = linear()

        def forward(self, images):
            return SimpleNamespace(aux=torch.zeros(len(images), 7), logits=self.main(images))

    task, model = ClassificationTask.tensors(train=data()), Two()
    assert task.loss(model, step()).item() == task.loss(model.main, step()).item()
    assert task.score(model, "holdout") == task.score(model.main, "holdout")


@pytest.mark.parametrize("batch", [1, 7, 512])
def test_the_score_is_in_percentage_points(batch):
    train, test = telling(), telling(30, wrong=3)
    task = ClassificationTask.tensors(train=train, test=test, normalise=PLAIN, score_batch=batch)
    assert task.score(Knows(), "holdout") == 100.0
    assert task.score(Knows(), "test") == 90.0
    model = Knows().double()
    task.score(model, "holdout")  # 6 images
    assert model.seen == [((min(batch, 6 - start), 3, 8, 8), torch.float64) for start in range(0, 6, batch)]
    assert not any(parameter.grad_fn for parameter in model.parameters())


def test_scoring_leaves_the_global_random_state_alone():
    task, model = ClassificationTask.tensors(train=data()), linear()
    before = torch.get_rng_state()
    task.score(model, "holdout")
    task.loss(model, step(crop="resized", flip=True, randaugment=(2, 9), erasing=0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_holdout_is_never_trained_on():
    x = torch.arange(60).view(60, 1, 1, 1).expand(60, 1, 8, 8).to(torch.uint8)
    task = ClassificationTask.tensors(train=(x, data()[1]), normalise=PLAIN)

    class Notes(nn.Module):
        def forward(self, images):
            self.seen = {*(images[:, 0, 0, 0] * 255).round().long().tolist()}
            return torch.zeros(len(images), 3)

    model = Notes()
    task.score(model, "holdout")
    held = model.seen
    trained = set()
    for number in range(22):
        images, _ = task.batch(Step(number=number, seed=1, recipe=Recipe(steps=9, batch=5)))
        trained |= {*(images[:, 0, 0, 0] * 255).round().long().tolist()}
    assert len(held) == 6 and not held & trained
    assert held | trained == {*range(60)}  # over two epochs


def made(kind, root):
    """The task, the file or folder of its test set, and the number of values of an image."""
    if kind == "cifar10":
        write_cifar10(root / "cifar-10-batches-bin")
        return ClassificationTask.cifar10(root), root / "cifar-10-batches-bin/test_batch.bin", (10, 3072)
    if kind == "cifar100":
        write_cifar100(root / "cifar-100-binary")
        return ClassificationTask.cifar100(root), root / "cifar-100-binary/test.bin", (100, 3072)
    if kind == "fashion":
        write_fashion_mnist(root / "FashionMNIST/raw")
        return ClassificationTask.fashion_mnist(root), root / "FashionMNIST/raw/t10k-images-idx3-ubyte", (10, 784)
    write_folder(root)
    return ClassificationTask.image_folder(root, size=16, workers=0), root / "val", (3, 768)


KINDS = ("cifar10", "cifar100", "fashion", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_the_test_set_is_read_for_its_own_score_alone(tmp_path, kind):
    task, test, (classes, inputs) = made(kind, tmp_path)
    assert 0.0 <= task.score(linear(classes, inputs), "test") <= 100.0
    test.rename(tmp_path / "gone")
    task = cloudpickle.loads(cloudpickle.dumps(task))
    model = linear(classes, inputs)
    assert 0.0 <= task.score(model, "holdout") <= 100.0
    assert task.loss(model, step()).isfinite()
    assert task.steps_per_epoch(Recipe(epochs=1, batch=5)) >= 1
    with pytest.raises(DataError):
        task.score(model, "test")


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_travels_without_its_data(tmp_path, kind):
    task, _, (classes, inputs) = made(kind, tmp_path)
    model = linear(classes, inputs)
    score, loss = task.score(model, "holdout"), task.loss(model, step(flip=True)).item()
    text = cloudpickle.dumps(task)
    assert len(text) < 3000
    other = cloudpickle.loads(text)
    assert not other._data._kept
    assert (other.score(model, "holdout"), other.loss(model, step(flip=True)).item()) == (score, loss)
    assert repr(other) == repr(task)


def test_tensors_travel_with_their_task():
    task, model = ClassificationTask.tensors(train=data(), test=data(9, seed=1), size=12), linear(inputs=432)
    other = cloudpickle.loads(cloudpickle.dumps(task))
    assert torch.equal(other.batch(step())[0], task.batch(step())[0])
    assert other.score(model, "test") == task.score(model, "test")


def test_the_model_has_other_outputs_than_there_are_classes():
    task = ClassificationTask.tensors(train=data())
    message = (
        r"The model's output has the shape \(., 7\), and the data has 3 classes: expected \(batch, 3\)\. Replace the "
        "model's last layer, or choose other data"
    )
    with pytest.raises(DataError, match=message):
        task.loss(linear(7), step())
    with pytest.raises(DataError, match=message):
        task.score(linear(7), "holdout")


def test_floats_are_taken_as_they_are():
    x = torch.randn(60, 2, 4, 4)
    task = ClassificationTask.tensors(train=(x, data()[1]), holdout=0)
    images, _ = task.batch(Step(number=0, seed=1, recipe=Recipe(steps=1, batch=60)))
    assert torch.equal(images.flatten().sort().values, x.flatten().sort().values)


def refused(call, error, message):
    with pytest.raises(error) as found:
        call()
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            (torch.zeros(4, 8, 8), torch.zeros(4, dtype=torch.long)),
            None,
            "The train images are torch.float32 of shape (4, 8, 8), expected uint8 (0 to 255) or float of shape",
        ),
        (
            (torch.zeros(4, 1, 8, 8, dtype=torch.int64), torch.zeros(4, dtype=torch.long)),
            None,
            "The train images are torch.int64",
        ),
        (
            (torch.zeros(4, 1, 8, 8), torch.zeros(3, dtype=torch.long)),
            None,
            "The train labels are torch.int64 of shape (3,), expected one whole number for each of the 4 images",
        ),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(4)), None, "The train labels are torch.float32 of shape (4,), expected"),
        (
            data(),
            (torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)),
            "The test images have 1 channels of torch.float32, the training images 3 of torch.uint8; expected the same",
        ),
    ],
)
def test_tensors_that_are_no_images(train, test, message):
    refused(lambda: ClassificationTask.tensors(train=train, test=test), DataError, message)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (5, "train must be a pair of tensors, train=(images, labels); found int."),
        (data()[0], "train must be a pair of tensors, train=(images, labels); found Tensor."),
        ((data()[0],), "train must be a pair of tensors, train=(images, labels); found 1 things."),
        (("images", data()[1]), "The train images must be a tensor, found str: "),
        ((data()[0], [object()]), "The train labels must be a tensor, found list: "),
    ],
)
def test_what_is_no_pair_of_tensors(train, message):
    refused(lambda: ClassificationTask.tensors(train=train), InvalidValue, message)


def test_scores_that_cannot_be_taken():
    x, y = data()
    task = ClassificationTask.tensors(train=(x, y), test=(x, y + 1), holdout=0)
    refused(lambda: task.score(linear(), "holdout"), DataError, "This task holds out nothing (holdout=0), so there is")
    refused(
        lambda: task.score(linear(), "test"),
        DataError,
        "is 3, expected 0 to 2 (20 such labels in all)",
    )
    refused(lambda: task.score(linear(), "val"), InvalidValue, "A split is 'holdout' or 'test', found 'val'.")
    alone = ClassificationTask.tensors(train=(x, y))
    refused(
        lambda: alone.score(linear(), "test"), DataError, "This task has no test images. Give ClassificationTask.te"
    )


def test_labels_with_a_gap():
    x, y = data()
    task = ClassificationTask.tensors(train=(x, y * 2))
    refused(lambda: task.score(linear(), "holdout"), DataError, "class '1' has no image\n  class '3' has no image")


def test_options_that_make_no_sense():
    for size in (0, -3, 1.5, (3,), (3, 0), "8"):
        with pytest.raises(InvalidValue, match="size must be a"):
            ClassificationTask.tensors(train=data(), size=size)
    refused(
        lambda: ClassificationTask.tensors(train=data(), score_batch=0), InvalidValue, "score_batch must be a whole nu"
    )
    for normalise in (5, (0.5, 0.5), ((0.5,),), "ab", ((0.1,), ("x",)), ((0.1,), (0.2,), (0.3,))):
        refused(
            lambda: ClassificationTask.tensors(train=data(), normalise=normalise),  # noqa: B023
            InvalidValue,
            f"normalise must be (means, deviations), a number for every channel in each; found {normalise!r}. For",
        )
    for normalise in (((0.5,), (0.0,)), ((float("nan"),), (1.0,))):
        refused(
            lambda: ClassificationTask.tensors(train=data(), normalise=normalise),  # noqa: B023
            InvalidValue,
            f"normalise must have finite means, and deviations above 0; found {normalise!r}.",
        )
    refused(
        lambda: ClassificationTask.cifar10(5), InvalidValue, "The place of a dataset must be a path, found 5. Give it"
    )
    refused(lambda: ClassificationTask.image_folder("x", classes=5), InvalidValue, "classes must be several values in")
    task = ClassificationTask.tensors(train=data(), normalise=[[0.1, 0.2], [0.3, 0.4]])
    refused(
        lambda: task.batch(step()),
        InvalidValue,
        "normalise has 2 means and 2 deviations, and the images have 3 channels. Give one of each for every channel",
    )
