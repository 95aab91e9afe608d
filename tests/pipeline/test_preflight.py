"""compress() refuses unusable arguments before anything is measured."""

import dataclasses
import importlib
import sys

import pytest
import torch
from PIL import Image
from torch import nn

import depthfold as df
from cli_workshop import CONFIG, NET, depthfold, refused
from depthfold.core import FlaggedSpan, ImportanceTable, Score
from depthfold.errors import DataError, DepthfoldError, InvalidValue, MissingDependency, TraceError
from depthfold.jobs import Processes, RayCluster
from depthfold.training import FunctionTask


class MeasuredTooEarly(Exception):
    """The run has reached its first measurement."""


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    def stop(*_, **__):
        raise MeasuredTooEarly

    monkeypatch.setattr(importlib.import_module("depthfold.pipeline.artefacts"), "make_latency_table", stop)


def model(channels=1):
    torch.manual_seed(0)
    layers = nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()


def images(number=24, channels=1):
    return torch.rand(number, channels, 8, 8), torch.arange(number) % 3


def task(**changed):
    return df.ClassificationTask.tensors(**{"train": images(), "test": images(), "holdout": 0.25} | changed)


def own_task(**attributes):
    """Return a task with only the methods of the protocol and these attributes."""

    class Own:
        def loss(self, model, step):
            raise AssertionError("not before the first measurement")

        score = loss

        def steps_per_epoch(self, recipe):
            return 1

    for name, value in attributes.items():
        setattr(Own, name, value)
    return Own()


@pytest.fixture
def compress(tmp_path):
    def command(given=None, **changed):
        arguments = {"target": "cost_model", "budget": "80%", "run": tmp_path / "run"}
        names = [field.name for field in dataclasses.fields(df.Options)]
        options = {"exports": ("m.pt2",)} | {name: changed.pop(name) for name in names if name in changed}
        arguments |= {"options": df.Options(**options)} | changed
        df.compress(model(arguments.pop("channels", 1)), given or task(), **arguments)

    return command


def table():
    entry = Score(span=FlaggedSpan(i=0, j=1, a=True, b=True), samples=(1.0,))
    return ImportanceTable(network="n", fingerprint="f", base=1.0, entries=(entry,))


def test_valid_arguments_are_measured(compress):
    with pytest.raises(MeasuredTooEarly):
        compress()
    with pytest.raises(MeasuredTooEarly):  # no importance is measured, so nothing needs to be held out
        compress(task(holdout=0), importance=table())


def test_user_tasks_need_only_the_protocol(compress):
    given = {"example_inputs": torch.rand(1, 1, 8, 8)}
    with pytest.raises(MeasuredTooEarly):
        compress(own_task(), **given)
    with pytest.raises(MeasuredTooEarly):
        compress(FunctionTask(loss=max, score=max, epoch_steps=1), **given)
    with pytest.raises(InvalidValue, match="but this task has none"):
        compress(own_task(has_holdout=False), **given)


@pytest.mark.parametrize("name", ["recipe", "importance_recipe"])
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (df.Recipe(epochs=1, batch=4, warmup=9), r"warmup \(9\) must be shorter than its 1 epochs \(4 steps\)"),
        (df.Recipe(steps=1, batch=4, randaugment=(2, 9)), "RandAugment needs uint8 images, found torch.float32"),
        (df.Recipe(steps=1, batch=400), None),
    ],
)
def test_recipe_that_cannot_train_the_task_is_refused(name, recipe, said, compress, tmp_path):
    with pytest.raises(MeasuredTooEarly if said is None else InvalidValue, match=said):
        compress(**{name: recipe})
    assert (tmp_path / "run").exists() == (said is None)


def test_recipe_that_asks_for_more_than_the_task_knows_is_refused(compress):
    given = {"example_inputs": torch.rand(1, 1, 8, 8)}
    with pytest.raises(InvalidValue, match="this task does not know how many steps an epoch has"):
        compress(FunctionTask(loss=max, score=max), importance_method="trained", **given)
    with pytest.raises(MeasuredTooEarly):  # the default recipes count steps
        compress(FunctionTask(loss=max, score=max), **given)
    with pytest.raises(InvalidValue, match=r'keep="best"\), but there is no hold-out set'):
        compress(task(holdout=0), importance=table(), recipe=df.Recipe(steps=1, batch=4, keep="best"))


def test_missing_test_set_is_refused(compress, tmp_path):
    with pytest.raises(DataError, match="This task has no test images"):
        compress(task(test=None))
    with pytest.raises(DataError, match="This task has no test images"):
        compress(task(test=None), importance=table())
    for name in "abc":
        (tmp_path / "images/train" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / f"images/train/{name}/{number}.png")
    with pytest.raises(DataError, match="Expected a folder val in"):
        compress(df.ClassificationTask.image_folder(tmp_path / "images"), channels=3)


def test_missing_holdout_is_refused(compress):
    with pytest.raises(InvalidValue, match="but this task has none"):
        compress(task(holdout=0))
    with pytest.raises(DataError, match="cannot be split with holdout=8"):
        compress(task(holdout=8), example_inputs=torch.rand(1, 1, 8, 8))


@pytest.mark.parametrize("wrap", [lambda inputs: inputs, lambda inputs: (inputs,), lambda inputs: {"input": inputs}])
def test_images_with_another_number_of_channels_are_refused(wrap, compress):
    with pytest.raises(DataError, match=r"The images of the task have 1 channel, and the example inputs .* have 3\."):
        compress(channels=3, example_inputs=wrap(torch.rand(1, 3, 8, 8)))


def test_model_without_one_score_per_class_is_refused(compress):
    pixels, labels = images()
    four = task(train=(pixels, torch.arange(len(labels)) % 4))
    with pytest.raises(DataError, match=r"the shape \(1, 3\), expected \(batch, 4\) for the 4 classes"):
        compress(four)


class Asserting(nn.Sequential):
    def forward(self, x):
        if x.shape[-1] != 32:
            raise AssertionError(
                "expected images of 32."
            )  # an assert, as some libraries have it; pytest rewrites those
        return super().forward(x)


def test_model_that_asserts_the_image_size(tmp_path):
    with pytest.raises(DataError, match=r"of the shape \(1, 1, 8, 8\): .*expected images of 32\. Give the task"):
        df.compress(
            Asserting(*model()),
            task(),
            target="cost_model",
            budget="80%",
            run=tmp_path,
            example_inputs=torch.rand(1, 1, 32, 32),
        )


def test_model_that_cannot_take_the_images_is_refused(tmp_path):
    fixed = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30 * 30, 3)).train()
    with pytest.raises(DataError, match=r"cannot take an image of the task, of the shape \(1, 1, 8, 8\): "):
        df.compress(
            fixed, task(), target="cost_model", budget="80%", run=tmp_path, example_inputs=torch.rand(1, 1, 32, 32)
        )
    assert fixed.training


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"exports": ("model.tflite",)}, "'model.tflite' cannot be exported: its suffix must be one of .onnx"),
        ({"exports": "model.onnx"}, "The option exports is a tuple of file names, such as"),
        ({"exports": (5,)}, "The option exports is a tuple of file names, such as"),
        ({"exports": ("../m.pt2",)}, "is outside the run folder"),
        ({"alpha": "1.2"}, "alpha must be a finite number of at least 0, found '1.2'"),
        ({"alpha": -1.2}, "alpha must be a finite number of at least 0, found -1.2. The paper uses 1.2 to 1.8."),
        ({"alpha": float("nan")}, "alpha must be a finite number of at least 0, found nan"),
        ({"recipe": 5}, "The option recipe is a Recipe or the name of a preset, found 5. Make one with preset("),
        ({"recipe": "quik"}, "There is no recipe 'quik'. Did you mean 'quick'?"),
        ({"importance_recipe": 5}, "The option importance_recipe is a Recipe or the name of a preset, found 5."),
        (
            {"importance_method": "breif"},
            "There is no method 'breif'. Did you mean 'brief'? The methods are 'trained',",
        ),
        (
            {"importance_method": "fit", "reinit": True},
            "The method 'fit' reinitialises no layer; only \"trained\" does.",
        ),
        ({"importance_recipe": "quik"}, "There is no recipe 'quik'. Did you mean 'quick'?"),
        ({"importance": "path.json"}, "The option importance is an ImportanceTable, found 'path.json'."),
        ({"executor": "ray"}, "An executor is an object with the method run"),
        ({"space": "papr"}, "There is no search space 'papr'"),
        ({"target": "onnxrutime"}, "no backend 'onnxrutime'"),
        ({"budget": "what?"}, "what?"),
        ({"options": {"alpha": 1.2}}, "compress() takes options=Options(...), found {'alpha': 1.2}."),
        ({"given": [1, 2], "example_inputs": torch.rand(1, 1, 8, 8)}, "A task has the methods loss, score and steps"),
    ],
)
def test_invalid_arguments_are_refused(changed, said, compress, tmp_path):
    with pytest.raises(DepthfoldError) as error:
        compress(**changed)
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["recipe", "importance_recipe"])
def test_features_of_a_network_without_linear_layers_are_refused(name, tmp_path):
    convolutional = nn.Sequential(*model()[:4], nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    options = df.Options(**{name: df.Recipe(steps=2, batch=4, features=2), "importance_method": "brief"})
    with pytest.raises(InvalidValue, match=r"\(features=2\), but Sequential has no linear layer"):
        df.compress(convolutional, task(), "cost_model", "80%", run=tmp_path / "run", options=options)
    assert not (tmp_path / "run").exists()


class Undecided(nn.Sequential):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize("given", [Undecided(*model()), [model()]])
def test_model_that_cannot_be_traced_leaves_no_folder(given, tmp_path):
    with pytest.raises(TraceError):
        df.compress(given, task(), target="cost_model", budget="80%", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("missing", "extra", "changed"),
    [
        ("accelerate", "train", {"importance": table()}),
        ("safetensors", "train", {}),
        ("cloudpickle", "processes", {"executor": Processes(workers=1)}),
        ("ray", "ray", {"executor": RayCluster()}),
        ("jinja2", "report", {}),
    ],
)
def test_missing_libraries_are_reported(missing, extra, changed, compress, monkeypatch):
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=rf"pip install -e .\.\[{extra}\]."):
        compress(**changed)


def test_libraries_that_are_not_needed_may_be_missing(compress, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MeasuredTooEarly):
        compress(executor=RayCluster(), importance=table())


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ((", test=(images[64:], labels[64:])", ""), (), "This task has no test images."),
        (("holdout=0.25", "holdout=0"), (), "but this task has none."),
        (("rand(96, 1", "rand(96, 2"), ("--input", "1x8x8"), "The images of the task have 2 channels"),
    ],
)
def test_invalid_arguments_are_refused_on_the_command_line(change, options, said, tmp_path):
    (tmp_path / "net.py").write_text(NET.replace(*change))
    (tmp_path / "tiny.toml").write_text(CONFIG)
    assert said in refused("compress", "--config", tmp_path / "tiny.toml", "--run", tmp_path / "run", *options)


@pytest.mark.parametrize("command", ["compress", "importance", "finetune"])
def test_input_size_that_differs_from_the_users_images_is_refused(command, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    told = ("--config", tmp_path / "tiny.toml", "--run", tmp_path / "run", "--input", "1x64x32")
    said = refused(command, *told)
    assert "The images of the data are 8x8, but --input asks for 64x32. Images from a function in" in said
    assert "leave out --input" in said


def test_input_size_of_the_users_images_is_accepted(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    result = depthfold("compress", "--config", tmp_path / "tiny.toml", "--run", tmp_path / "run", "--input", "1x8x8")
    assert "MeasuredTooEarly" in result.output


def test_library_model_without_weights_gives_a_warning(tmp_path, monkeypatch):
    """Only for commands that train: inspect and latency need no weights."""
    monkeypatch.setattr("depthfold.settings.session.make_model", lambda *_: model())
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "tiny.toml").write_text(CONFIG)

    def said(command, name, *options):
        told = "--config", tmp_path / "tiny.toml", "--run", tmp_path / "run", *options
        return " ".join(depthfold(command, name, *told).stderr.split())

    random = "Warning: The model 'torchvision:resnet18' has random weights, because none were given"
    assert random in said("compress", "torchvision:resnet18")
    assert "--weights DEFAULT for torchvision," in said("compress", "torchvision:resnet18,num_classes=3")
    assert "random weights" not in said("compress", "torchvision:resnet18", "--weights", "DEFAULT")
    assert "random weights" not in said("compress", "timm:resnet18,pretrained=True")
    assert "random weights" not in said("compress", f"{tmp_path / 'net.py'}:model")
    assert "random weights" not in said("inspect", "torchvision:resnet18")


def test_inputs_of_a_trace_are_known(tmp_path):
    """A task of the user's own has no example."""
    given = {"target": "cost_model", "budget": "80%", "run": tmp_path / "run"}
    own, options = model(), df.Options(exports=("m.pt2",))
    with pytest.raises(InvalidValue, match=r"The inputs of the model are not known\. Give them"):
        df.compress(own, own_task(), options=options, **given)
    with pytest.raises(MeasuredTooEarly):
        df.compress(own, own_task(), options=options, traced=df.trace(own, images(1)[0]), **given)
    other = df.trace(model(channels=3), images(1, channels=3)[0])
    with pytest.raises(DataError, match="have 1 channel, and the example inputs of the model have 3"):
        df.compress(model(channels=3), task(), options=options, traced=other, **given)


@pytest.mark.parametrize("already_traced", [True, False])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("0.weight", r"^0\.weight of the model is NaN in 1 of 36 values\. Load weights without NaN"),
        ("7.running_var", r"^7\.running_var of the model is NaN in 1 of 3 values"),
    ],
)
def test_weights_that_are_nan_are_refused(name, said, already_traced, tmp_path):
    """A network with NaN is not equal to itself, so comparing it with its trace would blame the trace."""
    spoiled = nn.Sequential(*model(), nn.BatchNorm1d(3)).eval()
    spoiled.state_dict()[name].view(-1)[0] = torch.nan
    traced = df.trace(spoiled, images(1)[0]) if already_traced else None
    with pytest.raises(InvalidValue, match=said):
        df.compress(spoiled, task(), "cost_model", "80%", run=tmp_path / "run", traced=traced)
    assert not (tmp_path / "run").exists()


def test_unusual_buffers_are_accepted(tmp_path):
    """The mask of an attention, and a cache that nothing has filled yet."""
    unusual = model()
    unusual.register_buffer("mask", torch.full((2,), -torch.inf))
    unusual.register_buffer("cache", torch.full((2,), torch.nan), persistent=False)
    with pytest.raises(MeasuredTooEarly):
        df.compress(unusual, task(), "cost_model", "80%", run=tmp_path / "run")


def test_traced_network_must_be_of_the_model(tmp_path):
    one, other = model(), model()
    nn.init.zeros_(other[0].weight)
    network, body = df.trace(one, images(1)[0]), df.trace(nn.Sequential(one), images(1)[0], at="0")

    def compress(given, traced, **options):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # another one each time
        options = df.Options(exports=("m.pt2",), **options)
        df.compress(given, task(), "cost_model", "80%", run=folder, traced=traced, options=options)

    with pytest.raises(MeasuredTooEarly):
        compress(one, traced=network)
    with pytest.raises(MeasuredTooEarly):
        compress(nn.Sequential(one), traced=body)
    for wrong in (other, nn.Sequential(one)):
        with pytest.raises(InvalidValue, match=r"not traced from this model: 0\.weight differs\. Trace the"):
            compress(wrong, traced=network)
    for said in ({"ignore": ["0"]}, {"at": "0"}):
        with pytest.raises(InvalidValue, match="ignore and at say how to trace, and the network is traced already"):
            compress(one, traced=network, **said)
    with pytest.raises(InvalidValue, match=r"compress\(\) takes a TracedNetwork, found Sequential\."):
        compress(one, traced=one)
