"""Bad input of every kind: one clear paragraph and exit code 2."""

import errno
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cli_workshop import NET, depthfold, refused
from depthfold.settings.models import make_model


@pytest.fixture
def asked(workshop, tmp_path):
    """Return a command with the workshop's settings and other options; the last option counts."""

    def command(name, *options):
        return (name, "--config", workshop / "tiny.toml", "--run", tmp_path / "run", *options)

    return command


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "torchvision:mobilenet_v22",
            "torchvision has no model 'mobilenet_v22'. Did you mean torchvision:mobilenet_v2",
        ),
        ("timm:resnet19", "timm has no model 'resnet19'. Did you mean timm:resnet"),
        ("resnet18", "The model 'resnet18' is not valid. Did you mean torchvision:resnet18?"),
        ("torchvison:resnet18", "Did you mean torchvision:resnet18? Write torchvision:NAME, timm:NAME or file.py"),
        ("torchvision:", "'torchvision:' is not valid. The name of the torchvision model is missing. Write"),
        ("timm:", "'timm:' is not valid. The name of the timm model is missing. Write torchvision:NAME"),
        ("torchvision:resnet18,classes=3", "torchvision cannot make 'resnet18' with classes=3: "),
        ("{net}:modle", "net.py has no 'modle'. Did you mean 'model'? It has broken, data, layer, model, number"),
        ("{net}:broken", "net.py:broken' raised RuntimeError: the disk with the images is not mounted"),
        ("{net}:number", "must be a function that returns an nn.Module; it returned 7."),
        ("{net}", "does not name a function. Write file.py:function."),
        ("nowhere.py:model", "is missing: there is no file"),
    ],
)
def test_wrong_models_are_refused(model, said, workshop):
    assert said in refused("inspect", model.format(net=workshop / "net.py"), "--input", "3x64x64")


def test_unknown_torchvision_weights_are_refused():
    asked = ("inspect", "torchvision:resnet18", "--input", "3x64x64", "--weights")
    said = refused(*asked, "best_ckpt")
    assert "no weights 'best_ckpt' for 'resnet18', and there is no file of that name. It has IMAGENET1K_V1, DEF" in said
    assert "Did you mean 'IMAGENET1K_V1'? It has" in refused(*asked, "IMAGENET1K_V2")


def test_torchvision_weights_by_short_and_by_full_name(monkeypatch):
    """Nothing is downloaded here."""
    from depthfold.vision import import_torchvision

    asked, models = [], import_torchvision().models
    monkeypatch.setattr(models, "get_model", lambda name, weights: asked.append(weights) or nn.Identity())
    for weights in ("DEFAULT", "ResNet18_Weights.IMAGENET1K_V1"):
        make_model("torchvision:resnet18", weights)
    assert asked == ["DEFAULT", "ResNet18_Weights.IMAGENET1K_V1"]


@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_backbone_weights_are_not_downloaded_by_default(name, monkeypatch):
    """torchvision's default for a detector or a segmenter is to download the weights of the backbone."""
    from depthfold.vision import import_torchvision

    def download(url, *_, **__):
        raise OSError(f"nothing can be downloaded: {url.partition('/')[0]}")

    monkeypatch.setattr(import_torchvision().models._api, "load_state_dict_from_url", download)
    assert isinstance(make_model(f"torchvision:{name}"), nn.Module)
    asked = f"torchvision:{name},weights_backbone=DEFAULT"
    said = f"torchvision cannot make '{name}' with weights_backbone='DEFAULT': nothing can be downloaded: https:"
    assert refused("inspect", asked, "--input", "3x64x64") == f"Error: {said}"


def test_a_library_that_cannot_make_the_model(monkeypatch):
    from depthfold.vision import import_torchvision

    def fails(*_, **__):
        raise RuntimeError("no disk")

    monkeypatch.setattr(import_torchvision().models, "get_model", fails)
    said = refused("inspect", "torchvision:resnet18", "--input", "3x64x64")
    assert said == "Error: torchvision cannot make 'resnet18': no disk"


def test_an_input_that_is_too_large():
    said = refused("inspect", "torchvision:resnet18", "--input", "1x9999999x9999999")
    assert "A batch of 1 inputs of 1x9999999x9999999 takes 400 TB, which cannot be allocated." in said


def test_a_user_file_that_fails(tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    said = refused("inspect", f"{tmp_path / 'bad.py'}:model", "--input", "3x8x8")
    assert "bad.py raised ModuleNotFoundError: No module named 'nothing_of_that_name'" in said


@pytest.mark.parametrize("text", ["import sys; sys.exit(3)", "import sys\ndef model(): sys.exit(3)"])
def test_a_user_file_that_calls_sys_exit(text, tmp_path):
    (tmp_path / "ends.py").write_text(text)
    said = refused("inspect", f"{tmp_path / 'ends.py'}:model", "--input", "3x8x8")
    assert "called sys.exit(3). Put code that only a script runs under __main__." in said


def test_modules_beside_a_user_file_take_precedence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "test", raising=False)
    (tmp_path / "test.py").write_text("from torch import nn\n\n\ndef body():\n    return nn.Conv2d(3, 4, 3)\n")
    (tmp_path / "mine.py").write_text("from test import body\n\n\ndef model():\n    return body()\n")
    result = depthfold("inspect", f"{tmp_path / 'mine.py'}:model", "--input", "3x8x8")
    monkeypatch.delitem(sys.modules, "test", raising=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_of_another_model_are_refused(suffix, asked, tmp_path):
    weights, path = {"0.weight": torch.zeros(8, 1, 3, 3), "head.bias": torch.zeros(3)}, tmp_path / f"weights{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    said = refused(*asked("latency", "--weights", path))
    assert "do not fit the model" in said and "0.weight is 8x1x3x3 in the file and 4x1x3x3 in the model" in said
    assert "1.bias is missing" in said and "; and " in said and " more. Give weights of the same" in said


def test_weights_are_loaded(workshop, tmp_path):
    model = make_model(f"{workshop / 'net.py'}:model")
    assert all(map(torch.equal, model.parameters(), make_model(f"{workshop / 'net.py'}:model").parameters()))
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    save_file(changed, tmp_path / "w.safetensors")
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{name}": value for name, value in changed.items()}}, tmp_path / "w.pth"
    )
    for name in ("w.safetensors", "w.pth"):
        loaded = make_model(f"{workshop / 'net.py'}:model", str(tmp_path / name)).state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in changed.items())


class Harm:
    """An object whose pickle creates a folder when it is loaded."""

    def __reduce__(self):
        return (os.mkdir, ("harm-was-done",))


def test_weights_are_never_unpickled(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": Harm()}, tmp_path / "w.pt")
    assert "cannot be read" in refused(*asked("latency", "--weights", tmp_path / "w.pt"))
    assert not (tmp_path / "harm-was-done").exists()


@pytest.mark.parametrize("saved", [nn.Conv2d(1, 4, 3), {"a": 0.5}, [torch.zeros(3)], {"state_dict": Harm()}])
def test_weights_that_are_not_a_state_dict(saved, asked, tmp_path):
    torch.save(saved, tmp_path / "w.pt")
    check_advice_on_state_dicts(refused(*asked("latency", "--weights", tmp_path / "w.pt")), tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_weights_that_are_a_program(asked, tmp_path):
    torch.jit.trace(nn.ReLU(), torch.zeros(1)).save(tmp_path / "w.pt")
    check_advice_on_state_dicts(refused(*asked("latency", "--weights", tmp_path / "w.pt")), tmp_path)


def check_advice_on_state_dicts(said, folder):
    assert said.startswith("Error: ")
    assert "Only state dicts of tensors are read, because anything else in such a file could run code." in said
    assert said.endswith("Save one with torch.save(model.state_dict(), path), or with safetensors.")
    assert "weights_only" not in said and "torch.load" not in said and ".." not in said.replace(str(folder), "")


def test_missing_or_damaged_weights(asked, tmp_path):
    assert "There is no weights file" in refused(*asked("latency", "--weights", tmp_path / "none.pt"))
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert "cannot be read" in refused(*asked("latency", "--weights", tmp_path / "cut.safetensors"))
    assert "There is no weights file 'DEFAULT'" in refused(*asked("latency", "--weights", "DEFAULT"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("cifar10:/nowhere/at/all", "is missing: there is no folder /nowhere/at/all"),
        ("cifar-10:/tmp", "The data 'cifar-10:/tmp' is not valid. Did you mean cifar10:/tmp?"),
        ("{net}:number", "must be a function that returns a task"),
        ("{net}:broken", "raised RuntimeError: the disk with the images is not mounted"),
        ("{net}:dat", "has no 'dat'. Did you mean 'data'?"),
    ],
)
def test_wrong_or_missing_data_are_refused(data, said, asked, workshop):
    assert said in refused(*asked("compress", "--data", data.format(net=workshop / "net.py")))


def test_a_folder_without_the_dataset(asked, tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused(*asked("importance", "--data", f"cifar10:{tmp_path / 'empty'}"))
    assert "Expected data_batch_1.bin" in said and str(tmp_path / "empty") in said


@pytest.mark.parametrize("command", ["inspect", "latency", "compress"])
@pytest.mark.parametrize("size", [("--input", "1x8x8"), ()])
def test_a_batch_that_cannot_be_allocated(command, size, asked, tmp_path, monkeypatch):
    randn, repeat = torch.randn, torch.Tensor.repeat

    def limited(allocate):
        def allocated(*sizes, **more):
            if any(isinstance(size, int) and size == 200 for size in sizes):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 51200 bytes.")
            return allocate(*sizes, **more)

        return allocated

    monkeypatch.setattr(torch, "randn", limited(randn))
    monkeypatch.setattr(torch.Tensor, "repeat", limited(repeat))
    said = refused(*asked(command, *size, "--batch", 200))
    assert "A batch of 200 inputs of 1x8x8 takes 51.2 kB, which cannot be allocated. Give a smaller --batch" in said
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    assert depthfold(*asked("inspect", *size, "--batch", 199)).exit_code == 0


def test_an_unknown_backend(asked):
    assert "There is no backend 'onnxrutime'. Did you mean 'onnxruntime'?" in refused(
        *asked("latency", "--target", "onnxrutime")
    )


def test_a_backend_that_is_not_installed(asked, monkeypatch):
    for target in ("tensorrt", "openvino"):
        monkeypatch.setitem(sys.modules, target, None)
        said = refused(*asked("latency", "--target", target))
        assert f'pip install -e ".[{target}]"' in said


def test_a_budget_that_cannot_be_met_reports_the_fastest_plan(run):
    said = refused("compress", "--run", run, "--budget", "20x")
    assert "No plan meets the budget of 20x with a margin of 2%: the fastest one takes" in said
    least = int(re.search(r"times as fast\). Use a budget of (\d+)% or more, or other plans, ", said)[1])
    refused("solve", "--run", run, "--budget", f"{least - 2}%")  # the suggestion has one per cent for noise
    assert depthfold("solve", "--run", run, "--budget", f"{least}%").exit_code == 0


def test_a_run_folder_of_another_network(run, workshop):
    said = refused("latency", f"{workshop / 'net.py'}:other", "--run", run)
    assert "belongs to another network: Sequential with 3 layers" in said and "this one is Sequential with 2" in said


def test_a_run_folder_of_the_same_network_at_another_input_size(run, workshop):
    for command in (("latency", f"{workshop / 'net.py'}:model"), ("inspect",)):
        said = refused(*command, "--run", run, "--input", "1x12x12")
        assert "was measured with inputs of 1x8x8 at layer 1; now they are 1x12x12. Leave out --input (in P" in said


def test_a_latency_table_of_another_input_size(workshop, compressed):
    model, table = f"{workshop / 'net.py'}:model", workshop / "whole/latency.json"
    said = refused("inspect", model, "--input", "1x12x12", "--target", "cost_model", "--latency", table)
    assert "The latency table was measured with inputs of 1x8x8; now they are 1x12x12. Give inputs of the same" in said


@pytest.mark.parametrize(
    ("given", "fix"),
    [("3x8x8", "1x8x8."), ("8x8x1", "1x8x8 (channels first)."), ("8x12x1", "1x8x12 (channels first).")],
)
def test_an_input_with_other_channels_than_the_model(workshop, tmp_path, given, fix):
    said = refused("inspect", f"{workshop / 'net.py'}:model", "--input", given)
    channels = given.partition("x")[0]
    assert f"Error: The model does not take the inputs of --input {given}: they have {channels} channels, and" in said
    assert said.endswith(f"its first convolution takes 1. Give --input with 1 channel: --input {fix}")
    if given == "3x8x8":  # the data have one channel
        again = refused("compress", "--config", workshop / "tiny.toml", "--run", tmp_path / "run", "--input", given)
        assert again == said and not (tmp_path / "run").exists()


def test_an_input_that_fails_for_another_reason_keeps_the_error(workshop, tmp_path):
    (tmp_path / "rows.py").write_text(f"{NET}\ndef rows():\n    return nn.Sequential(model()[:3], nn.Linear(5, 2))\n")
    said = refused("inspect", f"{tmp_path / 'rows.py'}:rows", "--input", "3x8x8")
    assert "The model does not run on its example inputs" in said


def test_a_network_with_two_inputs(workshop, tmp_path):
    code = "class Two(nn.Conv2d):\n    def forward(self, one, two):\n        return super().forward(one + two)\n"
    (tmp_path / "two.py").write_text(f"{NET}\n{code}\ndef two():\n    return Two(3, 4, 3)\n")
    said = refused("inspect", f"{tmp_path / 'two.py'}:two", "--input", "3x8x8")
    assert "missing a required argument: 'two'" in said
    assert "or a single argument. The command line has only the last." in said


@pytest.mark.parametrize(
    "name", ["latency.jsonl", "config.toml", "importance.jsonl", "last.safetensors", "model.safeten"]
)
def test_a_full_disk(name, asked, monkeypatch):
    """The disk is full at the moment when the file is synced."""
    sync = os.fsync

    def fsync(handle):
        if name in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    said = refused(*asked("compress"))
    assert "No space left on device" in said and "Check" in said and "free space" in said
    monkeypatch.setattr(os, "fsync", sync)
    assert depthfold(*asked("compress")).exit_code == 0  # with free space it resumes


def test_a_run_folder_without_write_permission(asked, tmp_path, monkeypatch):
    """The system call is made to fail, because permissions do not stop root."""
    (tmp_path / "run").mkdir()
    opened = os.open

    def refuse(path, flags, *more, **named):
        if "/run/" in str(path) and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("pathlib.Path.write_text", lambda path, *_, **__: refuse(path, os.O_WRONLY))
    said = refused(*asked("latency"))
    assert "cannot be used: Permission denied. Check the folder, its permissions" in said


def test_a_file_with_the_name_of_the_run_folder(asked, tmp_path):
    (tmp_path / "run").write_text("a file")
    assert "cannot be used" in refused(*asked("latency"))


READERS = {
    "latency.json": "solve",
    "importance.json": "solve",
    "plan.json": "finetune",
    "network.json": "latency",
    "run.json": "latency",
    "findings.json": "report",
    "profiles.json": "compress",
}


@pytest.mark.parametrize(("name", "command"), READERS.items())
def test_a_truncated_document_is_refused(name, command, run):
    path = run / name
    path.write_text(path.read_text()[:-20])
    said = refused(command, "--run", run)
    assert f"{name} is damaged: This is not JSON" in said and "Delete it and run again" in said


def test_a_journal_damaged_in_the_middle(run):
    path = run / "importance.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "what?\n", *lines[1:]]))
    (run / "importance.json").unlink()  # a finished table is used without its journal
    assert "importance.jsonl, line 2: expected a JSON object" in refused("importance", "--run", run)


def test_tensorrt_without_its_library_and_without_a_gpu(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    said = refused(*asked("latency", "--target", "tensorrt"))
    assert said == 'Error: tensorrt is not installed. In a clone of depthfold, run: pip install -e ".[tensorrt]"'
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    said = refused(*asked("latency", "--target", "tensorrt"))
    assert "TensorRT needs an NVIDIA GPU, and PyTorch" in said and "or use another target" in said
    assert "for example onnxruntime" in said and "device=cpu" not in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"key": "0-1-1-1 seed 0"}', "it has no 'failure'"),
        ('{"foo": 3}', "it has no 'key'"),
        ('{"key": 3, "failure": "lost"}', "key: expected str, found 3"),
        ('{"key": "base", "result": 0.5}', "result: expected dict, found 0.5"),
        ('{"key": "base", "result": {"score": "good", "curve": [], "seconds": 1}}', "score: expected float, found 'g"),
        ('{"key": "base", "result": {"score": 1, "curve": [[1, 2]], "seconds": 1}}', "curve[0]: expected 3 items, fou"),
    ],
)
def test_a_wrong_line_in_the_importance_journal(line, why, run):
    (run / "importance.json").unlink()  # a finished table is used without its journal
    lines = [*(run / "importance.jsonl").read_text().splitlines(), line]
    (run / "importance.jsonl").write_text("\n".join(lines) + "\n")
    said = refused("importance", "--run", run)
    assert f"importance.jsonl, line {len(lines)} is not a record of this journal: {why}" in said
    assert "Delete that line, and its work is done again; or restore the file." in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"foo": 3}', "it has no 'key'"),
        ('{"key": "block"}', "it has no 'activations'"),
        ('{"key": "block", "samples": []}', "samples: expected at least one, found none"),
        ('{"key": "block", "samples": [1, "x"]}', "samples[1]: expected float, found 'x'"),
        ('{"key": "plan", "activations": 1, "cuts": []}', "activations: expected a list, found int"),
        ('{"key": "plan", "activations": [1, 2], "cuts": [3]}', "The activations [1, 2] are not among the cuts"),
    ],
)
def test_a_wrong_line_in_the_latency_journal(line, why, run):
    (run / "latency.json").unlink()
    text = (run / "latency.jsonl").read_text().splitlines()
    lines = [*text[:3], line, *text[3:]]
    (run / "latency.jsonl").write_text("\n".join(lines) + "\n")
    said = refused("latency", "--run", run)
    assert f"latency.jsonl, line 4 is not a record of this journal: {why}" in said
    (run / "latency.jsonl").write_text("\n".join(text) + "\n")  # without that line, as the message says
    assert depthfold("latency", "--run", run).exit_code == 0


@pytest.mark.parametrize(
    ("name", "command", "said"),
    [
        ("result/model.safetensors", "export", "the SHA-256 of the file does not match"),
        ("students/*/finetuning/last.safetensors", "merge", "last.safetensors is damaged"),
    ],
)
def test_changed_weights_are_refused(name, command, said, run):
    (path,) = run.glob(name)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert said in refused(command, "--run", run)


def test_config_that_is_not_toml(run):
    (run / "config.toml").write_text("model = ")
    assert "config.toml is not valid TOML" in refused("solve", "--run", run)


def test_an_unknown_input_size(workshop):
    said = refused("inspect", f"{workshop / 'net.py'}:model")
    assert "The size of the model's inputs is not known. Give --input 3x224x224" in said
