"""Saved results that are damaged, modified, or from another model are refused with a specific error."""

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
    """Modify fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(folder, text, model=None, error=ResultError):
    with pytest.raises(error, match=text):
        df.load(folder, classifier(1) if model is None else model)


def test_missing_folder_is_refused(tmp_path):
    refused(
        tmp_path / "none",
        r"There is no folder .*none\. Expected a folder written by save\(shallow, folder\) or `depthfold merge`",
    )


def test_folder_without_a_result_is_refused(tmp_path):
    refused(tmp_path, r"has no config\.json\. Expected a folder written by .* or `depthfold merge`")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused(tmp_path, r"config\.json has the format None, expected 'depthfold\.result'")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, r"has the format None")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b'{"format": "depthfold.result", "version": 1}'])
def test_damaged_config_is_refused(folder, text):
    (folder / "config.json").write_bytes(text)
    refused(folder, r"config\.json is damaged: .*\. Restore the folder, or save the network again\.$")


def test_newer_format_is_refused(folder):
    change(folder, version=2, depthfold="7.1", surprise=1)
    refused(folder, r"was written by a newer depthfold \(7\.1\) in version 2 .* reads version 1\. Upgrade with")
    change(folder, version="1")
    refused(folder, r"is damaged: This document has format 'depthfold\.result', version '1'")


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"model\.safetensors is missing\. Restore")


def test_modified_weights_are_refused(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for other in (data[:-1], data[: len(data) // 2], b"", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]):
        path.write_bytes(other)
        refused(folder, r"or config\.json was modified: the SHA-256 of the file does not match")
    path.write_bytes(data)
    assert df.load(folder, classifier(1)) is not None


def test_modified_weights_with_a_new_digest_are_refused(folder):
    from hashlib import sha256

    from safetensors.torch import load, save

    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())

    def forge(data):
        path.write_bytes(data)
        change(folder, sha256=sha256(data).hexdigest())

    forge(b"anything at all")
    refused(folder, "is not a safetensors file")
    forge(save({name: tensor for name, tensor in tensors.items() if name != "head.bias"}))
    refused(folder, r"does not contain the tensors listed in config\.json")
    forge(save(tensors | {"head.bias": tensors["head.bias"] + 1}))
    refused(folder, r"differs from the saved one by")


def test_modified_fingerprint_is_refused(folder):
    change(folder, fingerprint="0" * 16)
    refused(folder, r"was made from Net \(fingerprint 0{16}\), but this Net is another network \(fingerprint \w{16}\)")


def test_plan_that_does_not_fit_is_refused(folder):
    change(folder, plan={"activations": [], "cuts": [7]})
    refused(folder, r"The plan in .*config\.json does not fit Net: The plan has position 7.*Restore the folder")
    change(folder, plan={"activations": [2], "cuts": []})
    refused(folder, r"The plan in .* does not fit Net: The activations \[2\] must also be cuts")
    change(folder, plan={"activations": [1, 2, 3], "cuts": [1]})
    refused(folder, r"config\.json is damaged: The activations \[2, 3\] are not among the cuts \[1\]")


def test_modified_plan_is_refused(folder):
    change(folder, plan={"activations": [1, 2], "cuts": [1, 2]})
    refused(folder, r"do not fit the rebuilt network: 'conv2\.weight' is 6x6x3x3 instead of 6x6x5x5; 'conv3")
    change(folder, plan={"activations": [3], "cuts": [1]})  # the same tensors, one activation less
    refused(folder, r"differs from the saved one by .* config\.json was modified")


def test_other_architecture_is_refused(folder):
    wants = r"is another network .* Use the architecture that was traced, with inputs of 2x3x9x8 in float32\."
    refused(folder, wants, classifier(width=8))
    with pytest.raises(ResultError, match="is another network"):
        df.load(folder, classifier(), torch.zeros(1, 3, 12, 12))
    refused(folder, r"cannot be traced in the same way: The model does not run", nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_other_head_is_refused(folder):
    refused(folder, r"'head\.bias' is 7 instead of 4; 'head\.weight' is 7x6 instead of 4x6", classifier(classes=7))
    # This difference is neither in the fingerprint nor in the tensors.
    refused(folder, "differs from the saved one by", classifier(activation=nn.Sigmoid))


def test_ignored_batch_norm_with_another_epsilon_is_refused(tmp_path):
    df.save(merged(classifier(), ignore="norm1", plan=df.Plan((), (1,))), tmp_path)
    other = classifier(1)
    other.norm1.eps = 0.1
    refused(tmp_path, "differs from the saved one by", other)


def test_model_with_other_preprocessing_is_refused(tmp_path):
    """Only an input with different values at all positions detects the difference."""

    def model(run):
        torch.manual_seed(0)
        return Net(lambda net, x: net.b(net.a(run(x))), a=conv(3, 4), b=conv()).eval()

    df.save(merged(model(lambda x: x.relu()), plan=df.Plan((), ())), tmp_path)
    refused(tmp_path, "differs from the saved one by", model(lambda x: x.relu().flip(3)))


def test_model_without_the_traced_part_is_refused(tmp_path):
    df.save(merged(Around(), at="backbone"), tmp_path)
    refused(tmp_path, r"was made from Net, and the given Net cannot .*: Net has no submodule 'backbone'")
    with pytest.raises(DepthfoldError):
        df.load(tmp_path, Around().backbone)


def test_model_must_be_a_module(folder):
    refused(folder, r"load\(\) needs the model that was traced as an nn\.Module, found str", "net", InvalidValue)


@pytest.mark.parametrize("field", ["tensors", "example", "tied", "probe", "ignore", "sha256"])
@pytest.mark.parametrize("value", [None, 3, {"a": 1}, ["b"], "c"])
def test_field_of_another_type_raises_a_depthfold_error(folder, field, value):
    change(folder, **{field: value})
    with pytest.raises(DepthfoldError):
        df.load(folder, classifier(1))


def test_tied_name_without_a_tensor_is_refused(folder):
    change(folder, tied={"head.weight": "nowhere"})
    refused(folder, r"is damaged: Result\.tied: there is no tensor 'nowhere'")


def test_unknown_dtype_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["tensors"]["head.bias"]["dtype"] = "nn"
    change(folder, tensors=config["tensors"])
    refused(folder, r"is damaged: A tensor cannot have shape \[4\] and dtype 'nn'")


def test_unmodified_result_loads(folder):
    shallow = df.load(folder, classifier(1))
    wanted = merged(classifier(), plan=PLAN)
    assert torch.equal(shallow(picture()), wanted(picture()))
