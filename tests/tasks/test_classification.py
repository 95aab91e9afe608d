"""ClassificationTask: its loss, its score, and pickling."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import nn

from depthfold.errors import DataError, InvalidValue
from depthfold.tasks import ClassificationTask
from depthfold.tasks.classification import main_output
from depthfold.training import BatchTask, OutputTask, Recipe, Step, Task, train
from depthfold.training.capture import RECORDERS
from layouts import labels, pictures, write_cifar10, write_cifar100, write_fashion_mnist, write_folder
from small_training import Recorder, equal


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
    """A model that reads the class from the first pixel."""

    def __init__(self, classes=3):
        super().__init__()
        self.classes, self.seen = classes, []
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, images):
        self.seen.append((tuple(images.shape), images.dtype))
        label = (images[:, 0, 0, 0] * 255).round().long()
        return nn.functional.one_hot(label, self.classes).to(images.dtype)


def readable(count=60, wrong=0):
    """Return images whose first pixel is their label, except for `wrong` of them."""
    x, y = data(count)
    x[:, 0, 0, 0] = y
    x[:wrong, 0, 0, 0] = (y[:wrong] + 1) % 3
    return x, y


PLAIN = ((0.0,), (1.0,))


def test_classification_task_is_a_task_with_batches_and_outputs():
    task = ClassificationTask.tensors(train=data())
    assert isinstance(task, Task) and isinstance(task, BatchTask) and isinstance(task, OutputTask)


@pytest.mark.parametrize("teacher", [None, linear()], ids=["alone", "taught"])
def test_loss_is_that_of_the_batch(teacher):
    task, model = ClassificationTask.tensors(train=data()), linear().double()
    asked = step(teacher and teacher.double(), crop="pad", flip=True, erasing=0.5, label_smoothing=0.1)
    assert torch.equal(task.loss(model, asked), task.batch_loss(model, task.batch(asked), asked))


@pytest.mark.parametrize("changes", [{}, {"channels_last": True, "precision": "bfloat16"}], ids=str)
def test_captured_steps_give_the_same_weights(monkeypatch, changes):
    monkeypatch.setitem(RECORDERS, "cpu", Recorder())
    task = ClassificationTask.tensors(train=data())
    augmented = dict(crop="resized", flip=True, randaugment=(2, 9), erasing=0.5, label_smoothing=0.1)
    recipe = Recipe(steps=6, batch=5, **augmented, **changes)
    captured, eager = linear(), linear()
    assert train(captured, task, recipe).execution == "CUDA graph"
    train(eager, task, recipe, capture=False)
    assert equal(captured, eager)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_matches_hand_computation(smoothing):
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
def test_distillation_matches_hand_computation(temperature, share):
    task, model = ClassificationTask.tensors(train=data()), linear()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    images, y = task.batch(step())
    expected = 0.0
    for scores, taught, label in zip(model(images).tolist(), teacher(images).tolist(), y.tolist(), strict=True):
        soft = zip(softmax([t / temperature for t in taught]), softmax([s / temperature for s in scores]), strict=True)
        expected -= share * temperature**2 * sum(t * math.log(s) for t, s in soft)
        expected -= (1 - share) * math.log(softmax(scores)[label])
    asked = step(teacher, distillation=share, temperature=temperature, label_smoothing=0.2)  # smoothing is not used
    loss = task.loss(model, asked)
    assert loss.item() == pytest.approx(expected / 5, rel=1e-5)
    loss.backward()
    assert teacher[1].weight.grad is None


def test_main_output_is_found():
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
        with pytest.raises(
            DataError, match=rf"The model returned {type(output).__name__}, expected a tensor, or an object"
        ):
            main_output(output)


def test_model_with_several_outputs_is_trained_and_scored():
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
def test_score_is_in_per_cent(batch):
    train, test = readable(), readable(30, wrong=3)
    task = ClassificationTask.tensors(train=train, test=test, normalise=PLAIN, score_batch=batch)
    assert task.score(Knows(), "holdout") == 100.0
    assert task.score(Knows(), "test") == 90.0
    model = Knows().double()
    task.score(model, "holdout")  # 6 images
    assert model.seen == [((min(batch, 6 - start), 3, 8, 8), torch.float64) for start in range(0, 6, batch)]
    assert not any(parameter.grad_fn for parameter in model.parameters())


@pytest.mark.parametrize("batch", [1, 7, 512])
def test_outputs_are_the_class_scores_in_the_order_of_the_images(batch):
    x, y = data(30)
    task = ClassificationTask.tensors(train=data(), test=(x, y), normalise=PLAIN, score_batch=batch)
    model = linear().double()
    found = task.outputs(model, "test")
    assert found.dtype == torch.float64 and not found.requires_grad
    torch.testing.assert_close(found, model((x / 255).double()).detach(), rtol=1e-6, atol=1e-6)


def test_divergence_matches_hand_computation():
    """Kullback-Leibler, sum of p log(p / q), where p is the distribution of the reference."""
    torch.manual_seed(0)
    outputs, reference = 3 * torch.randn(9, 5), 3 * torch.randn(9, 5)
    outputs[:3], reference[:3] = reference[:3] + 8, reference[:3] - 8  # the same distributions
    outputs[3], reference[4] = torch.tensor([60.0, 0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 0, 60])
    found = ClassificationTask.tensors(train=data()).divergences(outputs, reference)
    expected = []
    for scores, right in zip(outputs.tolist(), reference.tolist(), strict=True):
        pairs = zip(softmax(right), softmax(scores), strict=True)
        expected.append(sum(p * math.log(p / q) for p, q in pairs))
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    same = ClassificationTask.tensors(train=data()).divergences(reference, reference)
    assert same.tolist() == [0.0] * 9


def test_global_random_state_is_not_changed():
    task, model = ClassificationTask.tensors(train=data()), linear()
    before = torch.get_rng_state()
    task.score(model, "holdout")
    task.loss(model, step(crop="resized", flip=True, randaugment=(2, 9), erasing=0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_holdout_images_are_never_trained_on():
    x = torch.arange(60).view(60, 1, 1, 1).expand(60, 1, 8, 8).to(torch.uint8)
    task = ClassificationTask.tensors(train=(x, data()[1]), normalise=PLAIN)

    class Recorder(nn.Module):
        def forward(self, images):
            self.seen = {*(images[:, 0, 0, 0] * 255).round().long().tolist()}
            return torch.zeros(len(images), 3)

    model = Recorder()
    task.score(model, "holdout")
    held = model.seen
    trained = set()
    for number in range(22):
        images, _ = task.batch(Step(number=number, seed=1, recipe=Recipe(steps=9, batch=5)))
        trained |= {*(images[:, 0, 0, 0] * 255).round().long().tolist()}
    assert len(held) == 6 and not held & trained
    assert held | trained == {*range(60)}  # over two epochs


def made(kind, root):
    """Return the task, the path of its test set, and the numbers of classes and of values per image."""
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
def test_test_set_is_read_only_to_be_scored(tmp_path, kind):
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
def test_task_is_pickled_without_its_data(tmp_path, kind):
    task, _, (classes, inputs) = made(kind, tmp_path)
    model = linear(classes, inputs)
    score, loss = task.score(model, "holdout"), task.loss(model, step(flip=True)).item()
    text = cloudpickle.dumps(task)
    assert len(text) < 3000
    other = cloudpickle.loads(text)
    assert not other._data._cache
    assert (other.score(model, "holdout"), other.loss(model, step(flip=True)).item()) == (score, loss)
    assert repr(other) == repr(task)


def test_tensors_are_pickled_with_their_task():
    task, model = ClassificationTask.tensors(train=data(), test=data(9, seed=1), size=12), linear(inputs=432)
    other = cloudpickle.loads(cloudpickle.dumps(task))
    assert torch.equal(other.batch(step())[0], task.batch(step())[0])
    assert other.score(model, "test") == task.score(model, "test")


def test_model_with_wrong_number_of_outputs_is_refused():
    task = ClassificationTask.tensors(train=data())
    message = (
        r"The model's output has the shape \(., 7\), expected \(batch, 3\) for the 3 classes of the data\. Replace the "
        "model's last layer, or use other data"
    )
    with pytest.raises(DataError, match=message):
        task.loss(linear(7), step())
    with pytest.raises(DataError, match=message):
        task.score(linear(7), "holdout")


def test_float_images_are_not_normalised():
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
            "The train labels are torch.int64 of shape (3,), expected an integer for each of the 4 images",
        ),
        ((torch.zeros(4, 1, 8, 8), torch.zeros(4)), None, "The train labels are torch.float32 of shape (4,), expected"),
        (
            data(),
            (torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)),
            "The test images have 1 channels of torch.float32, the training images 3 of torch.uint8; expected the same",
        ),
    ],
)
def test_wrong_tensors_are_refused(train, test, message):
    refused(lambda: ClassificationTask.tensors(train=train, test=test), DataError, message)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (5, "train must be a pair of tensors, train=(images, labels), found int."),
        (data()[0], "train must be a pair of tensors, train=(images, labels), found Tensor."),
        ((data()[0],), "train must be a pair of tensors, train=(images, labels), found 1 items."),
        (("images", data()[1]), "The train images must be a tensor, found str: "),
        ((data()[0], [object()]), "The train labels must be a tensor, found list: "),
    ],
)
def test_values_other_than_a_pair_of_tensors_are_refused(train, message):
    refused(lambda: ClassificationTask.tensors(train=train), InvalidValue, message)


def test_missing_or_wrong_split_is_refused():
    x, y = data()
    task = ClassificationTask.tensors(train=(x, y), test=(x, y + 1), holdout=0)
    refused(lambda: task.score(linear(), "holdout"), DataError, "This task has no hold-out set to score (holdout=0)")
    refused(
        lambda: task.score(linear(), "test"),
        DataError,
        "is 3, expected 0 to 2 (20 such labels in total)",
    )
    refused(lambda: task.score(linear(), "val"), InvalidValue, "A split is 'holdout' or 'test', found 'val'.")
    alone = ClassificationTask.tensors(train=(x, y))
    refused(lambda: alone.score(linear(), "test"), DataError, "This task has no test images. Pass test=")


def test_class_without_images_is_refused():
    x, y = data()
    task = ClassificationTask.tensors(train=(x, y * 2))
    refused(lambda: task.score(linear(), "holdout"), DataError, "has no images of 2 of its 5 classes:\n  1\n  3\n")


def test_wrong_options_are_refused():
    for size in (0, -3, 1.5, (3,), (3, 0), "8"):
        with pytest.raises(InvalidValue, match="size must be a"):
            ClassificationTask.tensors(train=data(), size=size)
    refused(
        lambda: ClassificationTask.tensors(train=data(), score_batch=0), InvalidValue, "score_batch must be an integer"
    )
    for normalise in (5, (0.5, 0.5), ((0.5,),), "ab", ((0.1,), ("x",)), ((0.1,), (0.2,), (0.3,))):
        refused(
            lambda: ClassificationTask.tensors(train=data(), normalise=normalise),  # noqa: B023
            InvalidValue,
            f"normalise must be (means, deviations) with a number for each channel, found {normalise!r}. For",
        )
    for normalise in (((0.5,), (0.0,)), ((float("nan"),), (1.0,))):
        refused(
            lambda: ClassificationTask.tensors(train=data(), normalise=normalise),  # noqa: B023
            InvalidValue,
            f"normalise must have finite means and deviations above 0, found {normalise!r}.",
        )
    refused(
        lambda: ClassificationTask.cifar10(5), InvalidValue, "The path of a dataset must be a path, found 5. Pass a"
    )
    refused(lambda: ClassificationTask.image_folder("x", classes=5), InvalidValue, "classes must be a sequence")
    task = ClassificationTask.tensors(train=data(), normalise=[[0.1, 0.2], [0.3, 0.4]])
    refused(
        lambda: task.batch(step()),
        InvalidValue,
        "normalise has 2 means and 2 deviations, but the images have 3 channels. Give one of each per channel",
    )


@pytest.mark.parametrize(("right", "chance"), [(0, True), (20, True), (27, True), (29, False), (100, False)])
def test_chance_is_a_share_of_one_over_the_classes_within_noise(right, chance):
    """Of 100 images of 5 classes, 20 are right by chance, with a standard error of 4."""
    images, labels = torch.rand(100, 1, 2, 2), torch.arange(100) % 5
    task = ClassificationTask.tensors(train=(images, labels), test=(images, labels))
    assert task.is_chance(right, "test") == chance


def test_few_images_cannot_be_told_from_chance():
    """Of 4 images of 2 classes, all right are within two standard errors of guessing."""
    images, labels = torch.rand(4, 1, 2, 2), torch.arange(4) % 2
    task = ClassificationTask.tensors(train=(images, labels), test=(images, labels))
    assert not any(task.is_chance(right, "test") for right in (0, 50, 100))


def test_a_single_class_is_refused():
    images, labels = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    task = ClassificationTask.tensors(train=(images, labels), test=(images, labels), holdout=0.5)
    for use in (task.example, lambda: task.count("holdout"), lambda: task.identity and task.preprocessing):
        with pytest.raises(DataError, match=r"has one class, '0', so every network is right .* at least two classes"):
            use()
