"""save() and load(): the loaded network equals the saved one, bit for bit."""

import json
import pickle
from random import Random

import pytest
import torch
import torchvision
from torch import nn

import depthfold as df
from depthfold.errors import InvalidValue, ResultError
from depthfold.testing import random_plan, randomise_statistics
from merged import Around, classifier, merged, picture
from nets import Net, conv
from tables import plausible_tables


def same(found, wanted, *inputs):
    with torch.no_grad():
        one, two = found(*inputs), wanted(*inputs)
    one, two = (one, two) if isinstance(one, dict) else ({0: one}, {0: two})
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("seed", range(4))
def test_loaded_network_is_bit_identical_for_any_weights_of_the_model(tmp_path, seed):
    shallow = merged(classifier(), seed=seed)
    folder = df.save(shallow, tmp_path / "runs" / "one")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    model = classifier(seed=9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = df.load(folder, model)
    assert same(again, shallow, picture(5))
    assert not again.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    df.save(again, tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "two" / name).read_bytes() == (folder / name).read_bytes()


def test_surrounding_autocast_changes_nothing(tmp_path):
    shallow = merged(classifier())
    df.save(shallow, tmp_path / "alone")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        df.save(shallow, tmp_path / "inside")
    assert (tmp_path / "inside" / "config.json").read_bytes() == (tmp_path / "alone" / "config.json").read_bytes()


def test_part_that_shares_weights_with_the_rest(tmp_path):
    def model():
        body = nn.Sequential(conv(3, 3), nn.ReLU(), conv(3, 3), nn.ReLU(), conv(3, 3))
        whole = Net(lambda net, x: net.other(net.body(x)), body=body, other=conv(3, 3))
        whole.other.weight = body[4].weight
        return whole

    traced = df.trace(model(), picture(1), at="body")
    shallow = df.merge(df.rewrite(traced, df.Plan((2,), (2,))))
    assert same(df.load(df.save(shallow, tmp_path), model()), shallow, picture(5))


def test_contents_of_the_config(tmp_path):
    plan = df.Plan({1, 3}, {1})
    shallow = merged(classifier(), plan=plan)
    config = json.loads((df.save(shallow, tmp_path) / "config.json").read_text())
    assert (config["format"], config["version"], config["name"]) == ("depthfold.result", 1, "Net")
    assert config["plan"] == {"activations": [1, 3], "cuts": [1]}
    assert config["example"] == {"args": [{"shape": [2, 3, 9, 8], "dtype": "float32"}], "named": None}
    assert config["tensors"]["conv1.weight"] == {"shape": [6, 3, 3, 3], "dtype": "float32"}
    assert config["tensors"]["conv2.weight"] == {"shape": [6, 6, 5, 5], "dtype": "float32"}
    assert (config["depthfold"], config["torch"]) == (df.__version__, torch.__version__)


def test_torchvision_model_with_a_solved_plan(tmp_path):
    def model(seed):
        torch.manual_seed(seed)
        return randomise_statistics(torchvision.models.mobilenet_v2(width_mult=0.25, num_classes=5), seed).eval()

    sample = torch.randn(1, 3, 32, 32)
    traced = df.trace(model(0), sample)
    frontier = df.solve(*plausible_tables(traced.spans(), traced.flagged_spans(), seed=0))
    shallow = df.merge(df.rewrite(traced, frontier.at("70%")))
    assert same(df.load(df.save(shallow, tmp_path), model(1)), shallow, sample)


def test_model_on_meta_is_enough(tmp_path):
    shallow = merged(classifier())
    df.save(shallow, tmp_path)
    with torch.device("meta"):  # it may still be active during load()
        again = df.load(tmp_path, classifier())
    assert same(again, shallow, picture())
    assert {tensor.device.type for tensor in (*again.parameters(), *again.buffers())} == {"cpu"}


def test_part_of_a_model_is_loaded_with_the_rest(tmp_path):
    """The model also has a non-persistent buffer."""
    shallow = merged(Around(), at="backbone")
    assert same(df.load(df.save(shallow, tmp_path), Around(seed=3)), shallow, picture())


@pytest.mark.parametrize("ignore", ["conv2", ("norm*",), (nn.BatchNorm2d, "conv1"), nn.ReLU])
def test_ignored_modules_are_ignored_again(tmp_path, ignore):
    shallow = merged(classifier(), plan=None, ignore=ignore)
    assert same(df.load(df.save(shallow, tmp_path), classifier(1)), shallow, picture())


def test_ignored_modules_of_a_part_are_saved_by_path(tmp_path):
    shallow = merged(Around(), at="backbone", ignore=(nn.BatchNorm2d, "backbone.conv1"))
    config = json.loads((df.save(shallow, tmp_path) / "config.json").read_text())
    assert config["ignore"] == ["backbone.norm1", "backbone.norm2", "backbone.norm3", "backbone.conv1"]
    assert same(df.load(tmp_path, Around(1)), shallow, picture())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_is_that_of_the_saved_network(tmp_path, dtype):
    shallow = merged(classifier()).to(dtype)
    again = df.load(df.save(shallow, tmp_path), classifier(1))
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert same(again, shallow, picture().to(dtype))


def tied(seed):
    model = classifier(seed, classes=6)
    model.last = nn.Linear(6, 6)
    model.last.weight = model.head.weight
    return model


def test_tied_tensors_stay_tied(tmp_path):
    shallow = merged(tied(0))
    again = df.load(df.save(shallow, tmp_path), tied(1))
    assert same(again, shallow, picture())
    assert again.last.weight is again.head.weight
    assert json.loads((tmp_path / "config.json").read_text())["tied"] in (
        {"head.weight": "last.weight"},
        {"last.weight": "head.weight"},
    )


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    shallow, model = merged(classifier()), classifier(1)
    df.save(shallow, tmp_path)
    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, None)
    assert same(df.load(tmp_path, model), shallow, picture())


def test_named_inputs_are_saved(tmp_path):
    shallow = merged(classifier(), inputs={"x": picture()})
    assert same(df.load(df.save(shallow, tmp_path), classifier(1)), shallow, picture())


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 4), conv()

    def forward(self, pictures):
        return self.b(self.a(pictures[0]))


def test_inputs_that_are_not_plain_tensors_are_required_again(tmp_path):
    shallow = merged(Pictures().eval(), inputs=[picture()], plan=df.Plan((), ()))
    df.save(shallow, tmp_path)
    with pytest.raises(InvalidValue, match=r"does not contain example inputs, .*load\(folder, model, example_inputs\)"):
        df.load(tmp_path, Pictures())
    assert same(df.load(tmp_path, Pictures(), [picture()]), shallow, [picture()])


def test_example_inputs_may_have_another_batch(tmp_path):
    shallow = merged(classifier())
    assert same(df.load(df.save(shallow, tmp_path), classifier(1), picture(7)), shallow, picture())


def test_only_merged_networks_are_saved(tmp_path):
    traced = df.trace(classifier(), picture())
    student = df.rewrite(traced, random_plan(traced.network, Random(0)))
    for other in (student, nn.Conv2d(3, 3, 3), "a name"):
        with pytest.raises(
            InvalidValue,
            match=rf"^{type(other).__name__} is not a merged network\. Expected the result of merge\(student\)",
        ):
            df.save(other, tmp_path)
    shallow, part = merged(classifier()), merged(Around(), at="backbone")
    with pytest.raises(InvalidValue, match=r"which is the merged network itself; found it at '0' in Sequential"):
        df.save(nn.Sequential(shallow, nn.Softmax(1)), tmp_path)
    with pytest.raises(
        InvalidValue, match=r"a model with the merged network at 'backbone'; found the merged network al"
    ):
        df.save(part.backbone, tmp_path)
    assert not list(tmp_path.iterdir())


def test_model_with_two_merged_parts_is_refused(tmp_path):
    pair = nn.Sequential(classifier(width=3), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), classifier(1))
    first = merged(pair, at="0")
    both = merged(first, at="3")
    with pytest.raises(InvalidValue, match=r"the plan of one merged network, found 2: '0', '3'"):
        df.save(both, tmp_path)


def test_failed_write_keeps_the_existing_result(tmp_path, monkeypatch):
    old, new = merged(classifier(), seed=1), merged(classifier(2), seed=2)
    df.save(old, tmp_path)
    (tmp_path / ".config.json.partial").mkdir()  # left by a process that was killed
    (tmp_path / ".config.json.partial" / "junk").write_text("")

    def full(path, *_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)  # the tensors have already been written
        with pytest.raises(
            ResultError, match=r"cannot be written: No space left on device\. Check the folder and its fr"
        ):
            df.save(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert same(df.load(tmp_path, classifier()), old, picture())


def test_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match=r"file/out cannot be written: (Not a directory|File exists)"):
        df.save(merged(classifier()), tmp_path / "file" / "out")


def test_network_with_nan_outputs_is_saved(tmp_path):
    shallow = merged(classifier())
    with torch.no_grad():
        shallow.head.bias.fill_(float("nan"))
    again = df.load(df.save(shallow, tmp_path), classifier(1))
    assert torch.equal(again.conv1.weight, shallow.conv1.weight)


def test_network_with_integer_outputs_is_saved(tmp_path):
    model = Net(lambda net, x: net.b(net.a(x)).argmax(1), a=conv(3, 4), b=conv()).eval()
    shallow = merged(model, plan=df.Plan((), ()))
    assert same(df.load(df.save(shallow, tmp_path), model), shallow, picture())
