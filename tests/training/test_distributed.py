"""Training with two processes: both have the same weights, equal to those of one process with the whole batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from depthfold.training import FunctionTask, Recipe, train
from small_training import TASK, Heads, SmallNet, score_of_heads

RECIPE = Recipe(steps=8, batch=8, lr=0.1, checkpoint=3, evaluate=4, ema=0.8)

SCRIPT = """
    import copy, json, math, os, sys
    import torch
    torch.set_num_threads(1)
    sys.path[:0] = [{tests!r}]
    from pathlib import Path
    from safetensors.torch import save_file
    from small_training import TASK, Heads, SmallNet, failing_at, loss, score, score_of_heads
    from torch import nn
    from depthfold.errors import DepthfoldError
    from depthfold.training import FunctionTask, Recipe, train

    out, rank, recipe = Path(sys.argv[1]), os.environ["RANK"], Recipe.loads(sys.argv[2])
    result = {{}}

    def keep(name, model):
        save_file({{key: value.clone() for key, value in model.state_dict().items()}}, out / f"{{name}}-{{rank}}.st")

    class Stop(Exception):
        pass

    def stop(step):
        raise Stop

    def nan(model, step):
        return loss(model, step) * (math.nan if step.number == 2 and step.rank == 1 else 1)

    def refused(*args, **kwargs):
        try:
            train(*args, **kwargs)
        except DepthfoldError as error:
            return f"{{type(error).__name__}}: {{error}}"

    # Without dropout and batch norm, the gradient of the whole batch is the mean of those of its parts.
    plain = SmallNet(dropout=0.0)
    plain.norm = nn.Identity()
    result["plain"] = train(plain, TASK, recipe.replace(features=0.7), teacher=SmallNet(seed=9)).score
    keep("plain", plain)

    heads = Heads()
    train(heads, FunctionTask(loss=Heads.loss, score=score_of_heads), recipe)
    keep("heads", heads)
    result["centres"] = heads.centres

    whole, folder = SmallNet(), out / f"folder-{{rank}}"
    result["whole"] = [point.loss for point in train(whole, TASK, recipe).curve]
    keep("whole", whole)
    try:
        train(SmallNet(), failing_at(5, stop), recipe, folder=folder)
    except Stop:
        result["stopped"] = True
    resumed = SmallNet() if rank == "0" else SmallNet(seed=8)  # the weights of the main process are used
    result["resumed"] = [point.loss for point in train(resumed, TASK, recipe, folder=folder).curve]
    keep("resumed", resumed)

    result["nan"] = refused(SmallNet(), FunctionTask(loss=nan, score=score), recipe)
    result["other"] = refused(SmallNet(), TASK, recipe.replace(lr=0.2), folder=folder)
    result["odd"] = refused(SmallNet(), TASK, recipe.replace(batch=3))
    (out / f"result-{{rank}}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return the folder in which two processes, started as by `torchrun`, wrote their results."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent.parent)))
    common = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    common |= dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")  # also on a machine with a GPU
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), RECIPE.dumps()],
            env=os.environ | common | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return folder


def result(out, rank):
    return json.loads((out / f"result-{rank}.json").read_text())


@pytest.mark.parametrize("name", ["plain", "heads", "whole", "resumed"])
def test_both_processes_have_the_same_weights(name, out):
    one, two = (load_file(out / f"{name}-{rank}.st") for rank in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert result(out, 0) == result(out, 1)


def test_weights_match_one_process_with_the_whole_batch(out):
    model = SmallNet(dropout=0.0)
    model.norm = torch.nn.Identity()
    train(model, TASK, RECIPE.replace(features=0.7), teacher=SmallNet(seed=9), device="cpu")
    found = load_file(out / "plain-0.st")
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    assert not torch.allclose(found["conv.weight"], SmallNet().conv.weight, atol=1e-3)


def test_loss_may_use_any_part_of_the_model(out):
    model = Heads()
    train(model, FunctionTask(loss=Heads.loss, score=score_of_heads), RECIPE, device="cpu")
    found = load_file(out / "heads-0.st")
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    assert torch.equal(model.unused.weight, Heads().unused.weight)  # as without a gradient: no weight decay
    assert not torch.allclose(model.every.weight, Heads().every.weight, atol=1e-3)


def test_resumed_training_ends_with_the_same_weights(out):
    whole, resumed = (load_file(out / f"{name}-0.st") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert result(out, 0)["stopped"]
    assert result(out, 0)["whole"] == result(out, 0)["resumed"]


def test_only_the_main_process_writes(out):
    assert {path.name for path in (out / "folder-0").iterdir()} == {
        "best.safetensors",
        "last.safetensors",
        "metrics.jsonl",
    }
    assert not (out / "folder-1").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_both_processes_raise_the_same_error(rank, out):
    messages = result(out, rank)
    assert messages["nan"].startswith("NotFinite: The loss is nan at step 3 of 8, with the learning rate ")
    assert (
        f"CheckpointError: The folder {out / 'folder-0'} holds another training run (recipe.lr: 0.1 there"
        in (messages["other"])
    )
    assert messages["odd"] == (
        "InvalidValue: The recipe's batch of 3 cannot be divided evenly among 2 processes. Use a multiple of 2."
    )
