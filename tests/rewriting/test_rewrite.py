"""rewrite() removes and inserts activations, moves padding, and returns a network that can be trained."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn

import depthfold as df
from depthfold.baselines.tables import constant_importance
from depthfold.errors import InvalidValue, PlanError
from nets import Net, agree, conv, image, only


def residual(activate=F.relu):
    """A residual network with three layers and an activation at position 1."""
    parts = dict(a=conv(), b=conv(), c=conv())
    if isinstance(activate, nn.Module):
        model = Net(lambda net, x: net.c(net.b(net.act(net.a(x))) + x), act=activate, **parts)
    else:
        model = Net(lambda net, x: net.c(net.b(activate(net.a(x))) + x), **parts)
    return model.double().eval()


def rewritten(model, activations, cuts, x=None):
    return df.rewrite(df.trace(model, image().double() if x is None else x), df.Plan(activations, cuts))


X = image().double()


def test_activations_outside_the_plan_become_identities():
    model = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv(), nn.ReLU(), conv()).double()
    student = rewritten(model, (2,), (1, 2, 3))
    agree(student(X), model[6](model[4](F.relu(model[2](model[0](X))))))
    assert sum(isinstance(part, nn.ReLU) for part in student.modules()) == 1


def test_inserted_activation_is_after_the_addition():
    model = residual()
    student = rewritten(model, (1, 2), (1, 2))
    agree(student(X), model.c(F.relu(model.b(F.relu(model.a(X))) + X)))
    student = rewritten(model, (2,), (1, 2))
    agree(student(X), model.c(F.relu(model.b(model.a(X)) + X)))


def test_inserted_activation_is_after_the_last_addition():
    model = Net(
        lambda net, x: (lambda y: net.d(net.c(y) + y + x))(net.b(F.relu(net.a(x)))),
        a=conv(),
        b=conv(),
        c=conv(),
        d=conv(),
    ).double()
    student = rewritten(model, (1, 3), (1, 2, 3))
    y = model.b(F.relu(model.a(X)))
    agree(student(X), model.d(F.relu(model.c(y) + y + X)))


def test_skip_after_an_inserted_activation_reads_its_output():
    model = Net(lambda net, x: (lambda y: net.c(F.relu(net.b(y))) + y)(net.a(x)), a=conv(), b=conv(), c=conv()).double()
    student = rewritten(model, (1, 2), (1, 2))
    y = F.relu(model.a(X))
    agree(student(X), model.c(F.relu(model.b(y))) + y)


def test_activation_at_the_last_position_stays():
    model = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU()).double()
    agree(rewritten(model, (), (1,))(X), F.relu(model[2](model[0](X))))
    agree(rewritten(model, (2,), (1,))(X), F.relu(model[2](model[0](X))))


def test_plan_can_insert_an_activation_at_the_last_position():
    model = residual()
    agree(rewritten(model, (3,), (1, 2))(X), F.relu(model.c(model.b(model.a(X)) + X)))
    agree(rewritten(model, (), (1, 2))(X), model.c(model.b(model.a(X)) + X))


def test_activation_at_a_barrier_is_removed_unless_the_plan_keeps_it():
    model = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), conv()).double()
    pool = model[2]
    agree(rewritten(model, (), ())(X), model[3](pool(model[0](X))))
    agree(rewritten(model, (1,), ())(X), model[3](pool(F.relu(model[0](X)))))
    agree(rewritten(model, (1,), (1,))(X), model[3](pool(F.relu(model[0](X)))))


KINDS = {
    "relu6": nn.ReLU6(inplace=True),
    "leaky": nn.LeakyReLU(0.3, inplace=True),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(approximate="tanh"),
    "prelu": nn.PReLU(init=0.4),
    "function": lambda x: F.leaky_relu(x, 0.3),
    "function in place": lambda x: F.leaky_relu(x, negative_slope=0.3, inplace=True),
    "function with underscore": torch.relu_,
    "method": lambda x: x.sigmoid(),
    "method with underscore": lambda x: x.tanh_(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inserted_activations_have_the_kind_of_the_network(kind):
    activate = KINDS[kind]
    model = residual(activate)
    student = rewritten(model, (1, 2), (1, 2))
    with torch.no_grad():
        agree(student(X), model.c(activate(model.b(activate(model.a(X))) + X)))


def test_inserted_kind_is_the_most_frequent_one():
    model = nn.Sequential(
        conv(), nn.Tanh(), conv(), nn.ReLU6(), conv(), nn.ReLU6(), conv(), nn.Identity(), conv()
    ).double()
    student = rewritten(model, (4,), (1, 2, 3, 4))
    agree(student(X), model[8](F.relu6(model[6](model[4](model[2](model[0](X)))))))


def test_inserted_prelu_has_one_slope_per_channel():
    prelu = nn.PReLU(4)
    prelu.weight.data = torch.tensor([0.125, 0.25, 0.375, 0.5])
    model = nn.Sequential(conv(), prelu, conv(4, 6), conv(6, 4)).double()
    student = rewritten(model, (1, 2), (1, 2))
    inserted = [part for part in student.modules() if isinstance(part, nn.PReLU) and part.num_parameters == 6]
    assert len(inserted) == 1
    agree(inserted[0].weight, torch.full((6,), 0.3125, dtype=torch.float64))
    agree(student(X), model[3](F.prelu(model[2](model[1](model[0](X))), torch.full((6,), 0.3125, dtype=torch.float64))))
    student(X).sum().backward()
    assert inserted[0].weight.grad is not None


def test_activations_inside_batch_norms_are_removed_and_copied():
    def norm():
        return BatchNormAct2d(4, act_layer=nn.SiLU)

    model = nn.Sequential(conv(), norm(), conv(), norm(), conv(), nn.BatchNorm2d(4), conv()).double().eval()
    student = rewritten(model, (1, 3), (1, 2, 3))
    bare = F.batch_norm(
        model[2](model[1](model[0](X))), model[3].running_mean, model[3].running_var, model[3].weight, model[3].bias
    )
    agree(student(X), model[6](F.silu(model[5](model[4](bare)))))
    assert isinstance(model[3].act, nn.SiLU)


def test_inserted_activations_do_not_share_parameters():
    model = nn.Sequential(conv(), nn.PReLU(), conv(), conv(), conv())
    student = df.rewrite(df.trace(model, image()), df.Plan((1, 2, 3), (1, 2, 3)))
    slopes = [part.weight for part in student.modules() if isinstance(part, nn.PReLU)]
    assert len({id(slope) for slope in slopes}) == 3


def test_padding_moves_to_the_front_of_a_segment():
    model = nn.Sequential(conv(stride=2), nn.ReLU(), conv(kernel=5, padding=2), conv()).double()
    student = rewritten(model, (2,), (2,))
    moved = F.pad(X, (5, 5, 5, 5))  # 1 + 2 * 2
    inner = F.conv2d(moved, model[0].weight, model[0].bias, stride=2)
    agree(student(X), model[3](F.relu(F.conv2d(inner, model[2].weight, model[2].bias))))
    paddings = [part.padding for part in student.modules() if isinstance(part, nn.Conv2d)]
    assert paddings == [(5, 5), (0, 0), (1, 1)]


def test_skip_inside_a_segment_is_cropped():
    model = Net(
        lambda net, x: net.d((lambda y: net.c(F.relu(net.b(y))) + y)(net.a(x))),
        a=conv(),
        b=conv(),
        c=conv(kernel=5),
        d=conv(),
    ).double()
    student = rewritten(model, (3,), (3,))

    def bare(layer, x):
        return F.conv2d(x, layer.weight, layer.bias)

    y = bare(model.a, F.pad(X, (4, 4, 4, 4)))
    agree(student(X), model.d(F.relu(bare(model.c, bare(model.b, y)) + y[..., 3:-3, 3:-3])))


def test_skip_from_the_front_of_a_segment_reads_the_unpadded_map():
    model = residual()
    student = rewritten(model, (2,), (2,))
    inner = F.conv2d(F.pad(X, (2, 2, 2, 2)), model.a.weight, model.a.bias)
    agree(student(X), model.c(F.relu(F.conv2d(inner, model.b.weight, model.b.bias) + X)))


def test_state_dict_has_the_keys_of_the_model_and_of_inserted_modules():
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.PReLU(), conv(), nn.BatchNorm2d(4), nn.PReLU(), conv())
    traced = df.trace(model, image())
    own = set(model.state_dict())
    assert set(df.rewrite(traced, traced.vanilla).state_dict()) == own
    keys = set(df.rewrite(traced, df.Plan((2, 3), (1, 2))).state_dict())
    assert own - keys == {"2.weight"}
    assert len(keys - own) == 1
    assert df.rewrite(traced, traced.vanilla).load_state_dict(model.state_dict())


def test_gradients_reach_every_parameter_and_a_training_step_works():
    model = Net(
        lambda net, x: net.d(F.relu(net.norm(net.c(net.b(F.relu(net.a(x))) + net.down(x))))),
        a=conv(4, 6, stride=2),
        b=conv(6, 6),
        down=nn.Sequential(nn.Conv2d(4, 6, 1, stride=2), nn.BatchNorm2d(6)),
        c=conv(6, 6),
        norm=nn.BatchNorm2d(6),
        d=conv(6, 2),
    ).train()
    traced = df.trace(model, image(13))
    student = df.rewrite(traced, df.Plan((2,), (2,)))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student(image(13)).square().mean().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in student.named_parameters() if "c.bias" not in n
    )
    optimizer.step()
    after = student.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before if "weight" in name or "running" in name)
    student.eval()
    with torch.no_grad():
        agree(df.merge(student)(image(13)), student(image(13)), 1e-4)


def test_in_place_activations_can_be_trained():
    model = residual(nn.ReLU(inplace=True)).float().train()
    student = df.rewrite(df.trace(model, image()), df.Plan((1, 2), (1, 2)))
    student(image()).sum().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_rewriting_twice_gives_independent_students():
    traced = df.trace(residual(), X)
    one, two = (df.rewrite(traced, only(traced, 0, 2)) for _ in range(2))
    with torch.no_grad():
        next(one.parameters()).zero_()
    assert not torch.equal(one(X), two(X))


class Tied(nn.Module):
    """A body, and a rest that shares a weight of one of its layers and the whole of another layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv(), nn.ReLU(), conv())
        self.other, self.shared = conv(), self.body[6]
        self.other.weight = self.body[0].weight

    def forward(self, x):
        return self.shared(self.other(self.body(x)))


def test_weights_shared_with_the_rest_of_the_model_stay_shared():
    model = Tied().double()
    traced = df.trace(model, X, at="body")
    before = copy.deepcopy(model.state_dict())
    student, second = (df.rewrite(traced, df.Plan((2, 3), (2,))) for _ in range(2))
    for each in (
        student,
        second,
        copy.deepcopy(student),
        df.rewrite(pickle.loads(pickle.dumps(traced)), traced.vanilla),
    ):
        assert each.other.weight is each.get_submodule("body.0").weight
        assert each.shared is each.get_submodule("body.6")
        assert len(list(each.parameters())) == len(list(model.parameters()))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student(X).square().mean().backward()
    optimizer.step()
    assert torch.equal(student.other.weight, student.get_submodule("body.0").weight)
    assert not torch.equal(student.other.weight, model.other.weight)
    for untouched in (model, traced.model, second):
        assert all(torch.equal(tensor, before[name]) for name, tensor in untouched.state_dict().items())
    shallow = df.merge(student)
    agree(shallow(X), student.eval()(X))
    assert sum(isinstance(part, nn.Conv2d) for part in shallow.body.modules()) == 3

    second.load_state_dict(student.state_dict())
    agree(second.eval()(X), student(X))
    assert second.other.weight is second.get_submodule("body.0").weight


def test_students_can_be_copied():
    student = rewritten(residual(), (2,), (2,))
    twin = copy.deepcopy(student)
    agree(twin(X), student(X))
    with torch.no_grad():
        next(student.parameters()).add_(1)
    assert not torch.equal(twin(X), student(X))
    agree(df.merge(twin)(X), twin(X))
    agree(df.merge(student)(X), student(X))


def test_students_accept_other_sizes():
    student = rewritten(residual(), (2,), (2,))
    for size in (7, 8, 20):
        x = image(size).double()
        agree(df.merge(student)(x), student(x))


@pytest.mark.parametrize(
    ("activations", "cuts", "message"),
    [
        ((), (3,), "Cuts must lie strictly between 0 and 3"),
        ((), (8,), "The plan has position 8, but the network has 3 layers"),
        ((2,), (1,), r"it crosses one end of the residual 0 -> 2|The activations \[2\] must also be cuts"),
        ((), (1,), r"\(1, 3\], because it crosses one end of the residual 0 -> 2; .* Add cuts there"),
    ],
)
def test_invalid_plans_are_refused(activations, cuts, message):
    with pytest.raises(PlanError, match=message):
        rewritten(residual(), activations, cuts)


def test_plan_that_was_solved_for_another_network_is_refused():
    """Its positions would fit, because the networks are equally deep."""
    wide, narrow = (
        nn.Sequential(conv(4, n), nn.ReLU(), conv(n, 4), nn.ReLU(), conv(4, n)).double().eval() for n in (4, 8)
    )
    traced, other, small = df.trace(wide, X), df.trace(narrow, X), df.trace(wide, X[..., :8])
    importances = constant_importance(traced.network)
    solved = df.solve(df.measure_latency(traced, "cost_model"), importances, network=traced.network)[0]
    for wrong in (other, small):
        own, there = wrong.network.fingerprint, traced.network.fingerprint
        message = f"another network or input size .fingerprint {there}; this one is {own}.* rewrite.traced, plan.plan"
        with pytest.raises(PlanError, match=message):
            df.rewrite(wrong, solved)
        for accepted in (solved.plan, dataclasses.replace(solved, fingerprint="")):  # a table of CSV knows no network
            df.rewrite(wrong, accepted)
    df.rewrite(traced, solved)


def test_plan_cannot_insert_into_a_network_without_activations():
    with pytest.raises(PlanError, match="the network has no activation to copy"):
        rewritten(nn.Sequential(conv(), conv()).double(), (1,), (1,))


def test_network_without_a_model_is_refused():
    traced = df.trace(residual(), X)
    read = df.Network.loads(traced.network.dumps())
    assert read == traced.network
    message = r"rewrite\(\) takes a TracedNetwork, found a Network without a model\. Pass the result of trace\("
    with pytest.raises(InvalidValue, match=message):
        df.rewrite(read, read.vanilla)


def test_wrong_argument_types_are_refused():
    traced = df.trace(residual(), X)
    with pytest.raises(
        InvalidValue, match=r"rewrite\(\) takes a TracedNetwork, found Plan\. Pass the result of trace\("
    ):
        df.rewrite(traced.vanilla, traced)
    with pytest.raises(PlanError, match=r"Expected a plan, found NoneType\. Give a Plan\(activations, cuts\)"):
        df.rewrite(traced, None)
