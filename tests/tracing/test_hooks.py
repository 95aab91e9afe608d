"""Hooks are the user's: a module that has some is one operation, is called as a whole, and keeps them."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn

import depthfold as df
from depthfold.errors import TraceError
from nets import Net, agree, codes, conv, folds_exactly, image, refusal


def body():
    return nn.Sequential(
        conv(), nn.Sequential(nn.ReLU(), conv(), nn.BatchNorm2d(4), nn.ReLU()), conv(), nn.ReLU(), conv()
    )


def test_a_forward_hook_on_a_container_is_called_with_values_by_student_and_merged_network():
    seen = []
    model = body().double().eval()
    model[1].register_forward_hook(lambda part, given, output: seen.append(output))
    x = image().double()
    traced = df.trace(model, x)
    assert all(type(value) is torch.Tensor for value in seen)  # none of torch.fx's
    assert [layer.where for layer in traced.network.layers] == ["0", "2", "4"]
    assert traced.network.barriers == (1,)
    assert codes(traced)["1"] == "hooked"
    assert "it has forward hooks" in refusal(traced, "1").why
    student = df.rewrite(traced, df.Plan((), (1,)))
    shallow = df.merge(student)
    seen.clear()
    agree(shallow(x), student(x))
    model(x)
    assert len(seen) == 3
    for value in seen[:2]:
        agree(value, seen[2])


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_a_container_that_changes_values_changes_them_in_student_and_merged_network(name):
    model = body()
    change = {
        "register_forward_hook": lambda part, given, output: output * 2,
        "register_forward_pre_hook": lambda part, given: (given[0] * 2,),
    }
    getattr(model[1], name)(change[name])
    traced = folds_exactly(model, image())
    assert codes(traced)["1"] == "hooked"


def test_a_hook_inside_a_hooked_container_is_kept_as_well():
    calls = []
    model = body()
    model[1].register_forward_hook(lambda *given: calls.append("container"))
    model[1][1].register_forward_pre_hook(lambda *given: calls.append("convolution"))
    traced = df.trace(model, image())
    shallow = df.merge(df.rewrite(traced, traced.vanilla))
    calls.clear()
    shallow(image())
    assert calls == ["convolution", "container"]


def test_the_output_of_a_hooked_container_may_be_anything():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, x, scale=1.0):
            return {"a": self.a(x), "b": self.b(x) * scale}

    part = Two()
    part.register_forward_hook(lambda *given: None)
    run = lambda net, x: (lambda two: net.c(F.relu(two["a"] + two["b"])))(net.two(net.stem(x), scale=2.0))  # noqa: E731
    traced = folds_exactly(Net(run, stem=conv(), two=part, c=conv()), image())
    assert [layer.where for layer in traced.network.layers] == ["stem", "c"]


def test_a_hook_on_the_activation_inside_a_norm_makes_the_norm_one_operation():
    norm = BatchNormAct2d(4)
    norm.act.register_forward_hook(lambda part, given, output: output * 2)
    traced = folds_exactly(nn.Sequential(conv(), norm, conv(), nn.ReLU(), conv()), image())
    assert traced.network.barriers == (1,)
    assert codes(traced)["1"] == "hooked"


class Collector(nn.Module):
    """Returns what hooks have put aside, as timm's feature extractors by hooks do."""

    def __init__(self):
        super().__init__()
        self.body, self.found = body(), []
        for part in (self.body[1], self.body[2]):
            part.register_forward_hook(self.put_aside)

    def put_aside(self, part, given, output):
        self.found.append(output)

    def forward(self, x):
        self.found.clear()
        self.body(x)
        return list(self.found)


def test_a_forward_that_returns_what_its_hooks_have_collected_is_an_error():
    with pytest.raises(TraceError) as error:
        df.trace(Collector(), image())
    assert str(error.value) == (
        "The forward of Collector cannot be recorded: it reads what its hooks have collected, and they do not run "
        'while torch.fx records. Change that in the model, or trace a submodule that does not do it, with at="...".'
    )
