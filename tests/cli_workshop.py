"""Helpers for tests of the command line: a user's file with a tiny CNN, its settings, and commands in this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import textwrap

import pytest
import typer.testing
from typer.testing import CliRunner

from depthfold.cli.commands import app

NET = textwrap.dedent(
    """
    import torch
    from torch import nn
    import depthfold as df


    def layer(channels_in, channels):
        convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(channels), nn.ReLU()


    def model():
        body = *layer(1, 4), *layer(4, 4), *layer(4, 4)
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


    def other():
        body = *layer(1, 4), *layer(4, 4)
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


    def data():
        random = torch.Generator().manual_seed(0)
        images, labels = torch.rand(96, 1, 8, 8, generator=random), torch.arange(96) % 3
        images[torch.arange(96), 0, 2 * labels] += 1
        return df.ClassificationTask.tensors(
            train=(images[:64], labels[:64]), test=(images[64:], labels[64:]), holdout=0.25
        )


    def broken():
        raise RuntimeError("the disk with the images is not mounted")


    def number():
        return 7
    """
)

CONFIG = textwrap.dedent(
    """
    model = "net.py:model"
    data = "net.py:data"
    target = "cost_model"
    budget = "80%"
    export = ["model.pt2"]

    [importance_recipe]
    steps = 3
    batch = 8

    [recipe]
    preset = "quick"
    steps = 12
    warmup = 2
    batch = 8
    evaluate = 4
    checkpoint = 4
    """
)


def depthfold(*arguments, **more):
    """Run a command in this process. Return its exit code, stdout and stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="depthfold", **more)


# Making the commands takes a tenth of a second, and there are hundreds of tests.
typer.testing._get_command = functools.cache(typer.main.get_command)


def refused(*arguments, code=2):
    """Run a command that must fail without a traceback. Return its stderr as one paragraph."""
    result = depthfold(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


@contextlib.contextmanager
def without_memory():
    """Do not measure peak memory, which starts a process per network and is tested with latency."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("depthfold.latency.profile")  # the attribute of that name is the function
        patch.setattr(module, "peak_memory", lambda *_: (None, "not measured in these tests"))
        yield
