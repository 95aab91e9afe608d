"""Results that are damaged, changed, or of another model: each is an error of its own, found before anything runs."""

import json

import pytest
import torch
from torch import nn

import depthfold as df
from depthfold.errors import DepthfoldError, InvalidValue, ResultError
from merged import Around, classifier, merged, picture
from nets import Net, conv

PLAN = df.Plan({1, 3}, {1})


@pytest.fixture
def folder(tmp_path):
    return df.save(merged(classifier(), plan=PLAN), tmp_path / "result")


def change(folder, **fields):
    """Rewrite fields of config.json by hand."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(folder, text, model=None, error=ResultError):
    with pytest.raises(error, match=text):
        df.load(folder, classifier(1) if model is None else model)


def test_a_folder_that_is_not_there(tmp_path):
    refused(
        tmp_path / "none",
        r"There is no folder .*none; expected one that save\(shallow, folder\) or `depthfold merge` wr",
    )


def test_a_folder_that_is_no_result(tmp_path):
    refused(tmp_path, r"is no saved result: it has no config\.json\. Expected what .* or `depthfold merge` wrote")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused(tmp_path, r"config\.json is no result of depthfold's: its format is None, expected 'depthfold\.result'")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, r"is no result of depthfold's: its format is None")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b'{"format": "depthfold.result", "version": 1}'])
def test_a_damaged_config(folder, text):
    (folder / "config.json").write_bytes(text)
    refused(folder, r"config\.json is damaged: .*\. Restore the folder, or save the network again\.$")


def test_a_newer_format(folder):
    change(folder, version=2, depthfold="7.1", surprise=1)
    refused(folder, r"was written by a newer depthfold \(7\.1\): it has version 2 .* reads version 1\. Upgrade with")
    change(folder, version="1")
    refused(folder, r"is damaged: This document has format 'depthfold\.result', version '1'")


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"model\.safetensors is missing: the result has no weights")


def test_weights_that_were_cut_short_or_changed(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for other in (data[:-1], data[: len(data) // 2], b"", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
        path.write_bytes(other)
        refused(folder, r"is not the file that was saved: its SHA-256 is not the one in config\.json")
    path.write_bytes(data)
    assert df.load(folder, classifier(1)) is not None


def test_weights_that_were_changed_together_with_their_digest(folder):
    from hashlib import sha256

    from safetensors.torch import load, save

    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())

    def forge(data):
        path.write_bytes(data)
        change(folder, sha256=sha256(data).hexdigest())

    forge(b"anything at all")
    refused(folder, "is no safetensors file")
    forge(save({name: tensor for name, tensor in tensors.items() if name != "head.bias"}))
    refused(folder, r"does not hold the tensors that config\.json lists")
    forge(save(tensors | {"head.bias": tensors["head.bias"] + 1}))
    refused(folder, r"does not compute what the saved one computed")


def test_a_changed_fingerprint(folder):
    change(folder, fingerprint="0" * 16)
    refused(folder, r"was made of Net \(fingerprint 0{16}\), and this Net is another network \(fingerprint \w{16}\)")


def test_a_plan_that_does_not_fit(folder):
    change(folder, plan={"activations": [], "cuts": [7]})
    refused(folder, r"The plan in .*config\.json does not fit Net: The plan has position 7.*The file was changed")
    change(folder, plan={"activations": [2], "cuts": []})
    refused(folder, r"The plan in .* does not fit Net: The activations \[2\] are no cuts of the plan")
    change(folder, plan={"activations": [1, 2, 3], "cuts": [1]})
    refused(folder, r"config\.json is damaged: The activations \[2, 3\] are not among the cuts \[1\]")


def test_another_plan(folder):
    change(folder, plan={"activations": [1, 2], "cuts": [1, 2]})
    refused(
        folder, r"do not fit the network that was made again: 'conv2\.weight' is 6x6x3x3 instead of 6x6x5x5; 'conv3"
    )
    change(folder, plan={"activations": [3], "cuts": [1]})  # the same tensors, one activation less
    refused(folder, r"does not compute what the saved one computed: it is off by .* config\.json was changed")


def test_another_architecture(folder):
    wants = r"is another network .* Give the architecture that was traced, with inputs of 2x3x9x8 in float32\."
    refused(folder, wants, classifier(width=8))
    with pytest.raises(ResultError, match="is another network"):
        df.load(folder, classifier(), torch.zeros(1, 3, 12, 12))
    refused(folder, r"cannot be traced in the same way: The model does not run", nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_another_head(folder):
    refused(folder, r"'head\.bias' is 7 instead of 4; 'head\.weight' is 7x6 instead of 4x6", classifier(classes=7))
    # Nothing of this is in the fingerprint or in the tensors.
    refused(folder, "does not compute what the saved one computed", classifier(activation=nn.Sigmoid))


def test_a_batch_norm_that_was_left_alone_with_another_epsilon(tmp_path):
    df.save(merged(classifier(), ignore="norm1", plan=df.Plan((), (1,))), tmp_path)
    other = classifier(1)
    other.norm1.eps = 0.1
    refused(tmp_path, "does not compute what the saved one computed", other)


def test_a_model_that_differs_in_what_it_does_with_its_input(tmp_path):
    """Told apart only by an input in which every place has its own number."""

    def model(run):
        torch.manual_seed(0)
        return Net(lambda net, x: net.b(net.a(run(x))), a=conv(3, 4), b=conv()).eval()

    df.save(merged(model(lambda x: x.relu()), plan=df.Plan((), ())), tmp_path)
    refused(tmp_path, "does not compute what the saved one computed", model(lambda x: x.relu().flip(3)))


def test_a_part_that_the_model_does_not_have(tmp_path):
    df.save(merged(Around(), at="backbone"), tmp_path)
    refused(tmp_path, r"was made of Net, and the Net that was given cannot .*: Net has no submodule 'backbone'")
    with pytest.raises(DepthfoldError):
        df.load(tmp_path, Around().backbone)


def test_no_model(folder):
    refused(folder, r"load\(\) takes the model that was traced, as an nn\.Module, found str", "net", InvalidValue)


@pytest.mark.parametrize("field", ["tensors", "example", "tied", "probe", "ignore", "sha256"])
@pytest.mark.parametrize("value", [None, 3, {"a": 1}, ["b"], "c"])
def test_a_field_of_another_kind_is_never_anything_but_our_error(folder, field, value):
    change(folder, **{field: value})
    with pytest.raises(DepthfoldError):
        df.load(folder, classifier(1))


def test_a_tie_to_nowhere(folder):
    change(folder, tied={"head.weight": "nowhere"})
    refused(folder, r"is damaged: Result\.tied: there is no tensor 'nowhere'")


def test_a_type_that_there_is_not(folder):
    config = json.loads((folder / "config.json").read_text())
    config["tensors"]["head.bias"]["dtype"] = "nn"
    change(folder, tensors=config["tensors"])
    refused(folder, r"is damaged: There is no tensor of shape \[4\] and type 'nn'")


def test_the_original_still_loads(folder):
    shallow = df.load(folder, classifier(1))
    wanted = merged(classifier(), plan=PLAN)
    assert torch.equal(shallow(picture()), wanted(picture()))
