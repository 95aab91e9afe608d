"""verify(): errors at the borders and in the interior, and its messages for invalid arguments."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import depthfold as df
from depthfold.errors import DepthfoldError, InvalidValue, OutOfMemory, VerificationError
from depthfold.merging import sensitivity
from nets import Net, agree, conv, image, only


def folded(cuts=(), dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), nn.MaxPool2d(1), conv(), nn.ReLU(), conv())
    student = df.rewrite(df.trace(model.to(dtype).eval(), image().to(dtype)), df.Plan((), cuts))
    return student, df.merge(student)


def first_convolution(module):
    return next(part for part in module.modules() if isinstance(part, nn.Conv2d))


def test_exact_merge_is_verified_with_the_tolerance_of_its_precision():
    found = df.verify(*folded())
    assert isinstance(found, df.Verification)
    assert found.ok
    assert found.tolerance == 1e-10
    assert max(found.border, found.interior, found.output) <= 1e-13
    assert [(each.span.i, each.span.j) for each in found.segments] == [(0, 2), (2, 4)]
    assert df.verify(*folded(dtype=torch.float32)).tolerance == 1e-4


def test_surrounding_autocast_changes_nothing():
    student, shallow = folded(dtype=torch.float32)
    expected = df.verify(student, shallow)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = df.merge(student)
        assert df.verify(student, again) == expected
    assert all(map(torch.equal, again.parameters(), shallow.parameters()))


def test_border_error_is_reported_at_the_borders():
    student, shallow = folded()
    first_convolution(shallow).padding_mode = "replicate"
    found = df.verify(student, shallow)
    assert not found.ok
    assert found.segments[0].border > 1e-2
    assert found.segments[0].interior <= 1e-13
    assert found.segments[1].interior <= 1e-13  # both networks give the next segment the same input
    assert found.output > 1e-10
    assert "first wrong segment (0, 2]" in str(found)


def test_border_error_of_the_last_segment_is_reported_only_there():
    student, shallow = folded()
    last = [part for part in shallow.modules() if isinstance(part, nn.Conv2d)][-1]
    last.padding_mode = "reflect"
    found = df.verify(student, shallow)
    assert found.border > 1e-2
    assert found.interior <= 1e-13
    assert found.output > 1e-3
    assert "first wrong segment (2, 4]" in str(found)


def test_error_is_attributed_to_its_segment_if_a_skip_starts_before_a_dropout():
    torch.manual_seed(0)
    model = Net(
        lambda net, x: (lambda y: net.c(F.relu(net.b(net.drop(y)))) + y)(F.relu(net.a(x))),
        a=conv(), b=conv(), c=conv(), drop=nn.Dropout(),
    )  # fmt: skip
    traced = df.trace(model.double().eval(), image().double())
    student = df.rewrite(traced, df.Plan((1,), (1,)))
    shallow = df.merge(student)
    shallow.get_submodule("a").bias.data += 1e-3
    wrong, following = df.verify(student, shallow).segments
    assert wrong.interior > 1e-5
    assert max(following.border, following.interior) <= 1e-13


def test_merged_network_runs_once():
    student, shallow = folded()
    calls = []
    first_convolution(shallow).register_forward_hook(lambda *_: calls.append(1))
    assert df.verify(student, shallow).ok
    assert len(calls) == 1


def test_result_is_one_line_in_a_notebook():
    student, shallow = folded()
    found = df.verify(student, shallow)
    assert repr(found) == f"<Verification ok: {found}>"
    with torch.no_grad():
        first_convolution(shallow).weight[0, 0, 2, 2] += 1e-3
    found = df.verify(student, shallow)
    assert repr(found) == f"<Verification failed: {found}>"


def test_wrong_weight_is_reported_in_the_interior():
    student, shallow = folded()
    with torch.no_grad():
        first_convolution(shallow).weight[0, 0, 2, 2] += 1e-3
    found = df.verify(student, shallow)
    assert not found.ok
    assert found.segments[0].interior > 1e-5
    assert "largest error at the borders" in str(found)
    assert "tolerance 1e-10" in str(found)


def test_wrong_student_is_reported():
    student, shallow = folded()
    with torch.no_grad():
        first_convolution(student).bias += 1e-3
    assert not df.verify(student, shallow).ok


def test_inputs_may_have_another_size_and_precision():
    student, shallow = folded()
    for inputs in (image(23).double(), image(9, batch=1), (image(30),), {"input": image(10)}):
        assert df.verify(student, shallow, inputs).ok


def test_inputs_are_those_of_the_whole_model_with_at():
    model = Net(lambda net, x: net.body(x + 1) if x.sum() > 0 else net.body(x), body=nn.Sequential(conv(), conv()))
    model.double().eval()
    student = df.rewrite(df.trace(model, image().double(), at="body"), df.Plan((), ()))
    shallow = df.merge(student)
    assert df.verify(student, shallow, image(17)).ok
    with torch.no_grad():
        first_convolution(shallow).bias += 1
    assert not df.verify(student, shallow, image(17)).ok


def test_training_modes_are_restored():
    student, shallow = folded()
    student.train()
    shallow.train()
    df.verify(student, shallow)
    assert student.training
    assert shallow.training


def test_other_modules_are_refused():
    student, shallow = folded()
    with pytest.raises(InvalidValue, match="Conv2d is not a rewritten network"):
        df.verify(conv(), shallow)
    with pytest.raises(InvalidValue, match=r"is not a merged network\. Expected the result of merge\(student\)"):
        df.verify(student, student)
    with pytest.raises(InvalidValue, match="Conv2d is not a merged network"):
        df.verify(student, conv())
    with pytest.raises(InvalidValue, match="NoneType is not a rewritten network"):
        df.verify(None, shallow)
    with pytest.raises(InvalidValue, match="NoneType is not a merged network"):
        df.verify(student, None)


def test_empty_batch_is_refused():
    student, shallow = folded()
    with pytest.raises(
        InvalidValue,
        match=r"^The inputs are an empty batch: .* a feature map of shape \(0, 4, .*Pass at least one image",
    ):
        df.verify(student, shallow, image()[:0])
    assert df.verify(student, shallow, image()[:1]).ok


def refused(student, shallow):
    """Return True if verify() fails or raises a DepthfoldError."""
    try:
        return not df.verify(student, shallow).ok
    except DepthfoldError:
        return True


def test_merged_network_of_another_plan_is_refused():
    one, _ = folded()
    _, other = folded(cuts=(1,))
    assert refused(one, other)


def test_merged_network_of_another_model_is_refused():
    student, _ = folded()
    other = df.trace(Net(lambda net, x: net.b(net.a(x)), a=conv(), b=conv()).double(), image().double())
    with pytest.raises(DepthfoldError):
        df.verify(student, df.merge(df.rewrite(other, df.Plan((), ()))))


def test_merged_network_with_another_output_size_is_refused():
    student, shallow = folded()
    first_convolution(shallow).padding = (1, 1)
    assert refused(student, shallow)


def test_invalid_inputs_raise_a_depthfold_error():
    student, shallow = folded()
    for inputs in (torch.zeros(1, 3, 8, 8), "text", ()):
        with pytest.raises(DepthfoldError):
            df.verify(student, shallow, inputs)


def damaged(student):
    """Return the student with an extra activation that is not in the plan."""
    student = copy.deepcopy(student)
    node = next(node for node in student.graph.nodes if node.op == "call_module")
    with student.graph.inserting_after(node):
        extra = student.graph.call_function(torch.tanh, (node,))
    node.replace_all_uses_with(extra, delete_user_cb=lambda user: user is not extra)
    student.recompile()
    return student


def test_merging_a_modified_student_raises():
    student, _ = folded()
    with pytest.raises(VerificationError, match="does not compute the same function as the rewritten one: largest"):
        df.merge(damaged(student))


def test_merging_a_student_whose_padding_was_changed_raises():
    student, _ = folded()
    second = [part for part in student.modules() if isinstance(part, nn.Conv2d)][1]
    second.padding = (1, 1)
    with pytest.raises(VerificationError):
        df.merge(student)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_infinite_values_are_an_error(value):
    student, shallow = folded()
    with torch.no_grad():
        first_convolution(student).weight[0, 0, 0, 0] = value
    with pytest.raises(VerificationError, match="values that are not finite, so it cannot be verified"):
        df.merge(student)
    with pytest.raises(VerificationError, match="not finite"):
        df.verify(student, shallow)


def test_infinite_values_before_an_activation_are_an_error():
    model = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU(), conv()).double().eval()
    student = df.rewrite(df.trace(model, image().double()), df.Plan((1,), (1,)))
    with torch.no_grad():
        first_convolution(student).bias[0] = -float("inf")
        assert student(image().double()).isfinite().all()
    with pytest.raises(VerificationError, match="values that are not finite, so it cannot be verified"):
        df.merge(student)


def test_merged_network_with_infinite_values_is_refused():
    student, shallow = folded()
    with torch.no_grad():
        first_convolution(shallow).weight[0, 0, 0, 0] = float("nan")
    found = df.verify(student, shallow)
    assert not found.ok
    assert found.interior == float("inf")


def test_in_place_activation_does_not_affect_the_comparison():
    model = nn.Sequential(conv(), nn.ReLU(inplace=True), conv(), nn.ReLU(inplace=True), conv()).double().eval()
    traced = df.trace(model, image().double())
    student = df.rewrite(traced, only(traced, 0, 2))
    shallow = df.merge(student)
    first_convolution(shallow).bias.data -= 1e6  # all negative, so the activation would hide the error
    assert df.verify(student, shallow).segments[0].interior > 1e3
    agree(student(image().double()), df.merge(student)(image().double()))


class Chaotic(nn.Module):
    """Two convolutions, and a function that amplifies a change in the last digit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = conv(), conv()

    def forward(self, x):
        y = torch.sigmoid(self.b(self.a(x)))
        for _ in range(24):
            y = 3.99 * y * (1 - y)  # the logistic map doubles a difference in each step
        return y


def test_chaotic_network_is_compared_with_its_sensitivity():
    traced = df.trace(Chaotic().double().eval(), image().double())
    student = df.rewrite(traced, df.Plan((), ()))
    shallow = df.merge(student)
    found = df.verify(student, shallow)
    assert found.ok
    assert found.output > found.tolerance  # no merged network could be more accurate
    assert max(found.border, found.interior) <= 1e-13
    assert "last digit of its input" in str(found)
    first_convolution(shallow).bias.data += 1e-6
    assert not df.verify(student, shallow).ok  # the segments still differ


def test_sensitivity_is_the_largest_of_several_changes_in_the_last_digit():
    wanted, seen = torch.full((99,), 2.0, dtype=torch.float64), []

    def run(change):
        seen.append(change(wanted))
        assert change(torch.tensor([1, 2])).tolist() == [1, 2]
        return wanted + [1.0, 4.0, 3.0, 2.0][len(seen) - 1]

    assert sensitivity(wanted, run) == 2.0  # 4 of 2
    assert len({tuple(values.tolist()) for values in seen}) == 4
    assert all(0 < (values - wanted).abs().max() <= 10 * 2.0**-51 for values in seen)


class Halved(nn.Module):
    """A stem in single and a body in half precision."""

    def __init__(self, cast, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.pool, self.cast = conv(), nn.MaxPool2d(2), cast
        self.body = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.ReLU(), conv()).to(dtype)

    def forward(self, x):
        return self.body(self.cast(self.pool(self.stem(x)))).float()


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda x: x.half(), torch.float16),
        (lambda x: x.to(torch.float16), torch.float16),
        (lambda x: x.to(dtype=torch.bfloat16), torch.bfloat16),
        (lambda x: x.bfloat16(), torch.bfloat16),
    ],
    ids=["half()", "to(float16)", "to(dtype=bfloat16)", "bfloat16()"],
)
def test_mixed_precision_uses_the_larger_tolerance(cast, dtype):
    model, x = Halved(cast, dtype).eval(), image()
    student = df.rewrite(df.trace(model, x), df.Plan((), (1,)))
    shallow = df.merge(student)
    found = df.verify(student, shallow)
    assert found.ok
    assert found.tolerance == {torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    assert (
        max(found.border, found.interior) < found.tolerance / 2
    )  # the rounding error of the weights, not of the feature maps
    agree(shallow(x), student(x), 2 * found.tolerance)
    assert {p.dtype for p in shallow.parameters()} == {torch.float32, dtype}
    with torch.no_grad():
        shallow.get_submodule("body.0").bias += 0.1
    assert not df.verify(student, shallow).ok


class HalfInside(nn.Module):
    """A module that cannot be traced and casts its input."""

    def __init__(self):
        super().__init__()
        self.conv = conv().half()

    def forward(self, x):
        return self.conv(x.half()).float() if x.numel() and x.isfinite().all() else x


def test_opaque_module_with_casts_runs_in_its_own_precision():
    torch.manual_seed(0)
    model = nn.Sequential(conv(), nn.ReLU(), conv(), HalfInside()).eval()
    student = df.rewrite(df.trace(model, image()), df.Plan((), ()))
    found = df.verify(student, df.merge(student))
    assert (found.ok, found.tolerance) == (True, 5e-3)


def test_single_and_double_precision_use_the_tolerance_of_single():
    model = Halved(lambda x: x.double(), torch.float64).eval()
    student = df.rewrite(df.trace(model, image()), df.Plan((), (1,)))
    assert df.verify(student, df.merge(student)).tolerance == 1e-4


def test_network_without_weights_is_refused():
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv()).to("meta").eval()
    student = df.rewrite(df.trace(model, image().to("meta")), df.Plan((), ()))
    expected = (
        'The rewritten network has no weights: 0.weight is on the device "meta". Load the weights of the model with '
        "load_state_dict(..., assign=True), and trace it again."
    )
    with pytest.raises(VerificationError) as error:
        df.merge(student)
    assert str(error.value) == expected


def test_weights_of_a_student_stay_as_they_are():
    """A segment reads a weight directly, and the weight differs from that of the merged network."""
    model = Net(lambda net, x: net.b(F.relu(net.a(net.p))) + net.c(x), a=conv(), b=conv(), c=conv())
    model.p = nn.Parameter(image(batch=1))
    traced = df.trace(model.eval(), image())
    student = df.rewrite(traced, traced.vanilla)
    shallow = df.merge(student)
    with torch.no_grad():
        student.p.add_(1)
    before = student.p.clone()
    assert not df.verify(student, shallow).ok
    assert torch.equal(student.p, before)


def test_large_batches_are_verified_with_two_images():
    """All feature maps are kept, and a model is often traced with the batch of its target."""
    torch.manual_seed(0)
    model, sizes = nn.Sequential(conv(), nn.ReLU(), conv()).double().eval(), set()
    student = df.rewrite(df.trace(model, image(batch=64).double()), df.Plan((), ()))
    shallow = df.merge(student)
    hook = lambda module, args: sizes.add(len(args[0]))  # noqa: E731
    next(part for part in shallow.modules() if isinstance(part, nn.Conv2d)).register_forward_pre_hook(hook)
    assert df.verify(student, shallow).ok and sizes == {2}
    assert df.verify(student, shallow, image(batch=5).double()).ok and sizes == {2, 5}


def test_model_that_needs_its_batch_is_verified_with_it():
    torch.manual_seed(0)
    model = Net(lambda net, x: net.b(net.a(x)).reshape(6, -1) * x.mean(), a=conv(), b=conv()).double().eval()
    student = df.rewrite(df.trace(model, image(batch=6).double()), df.Plan((), ()))
    assert df.verify(student, df.merge(student)).ok
    fixed = Net(lambda net, x: net.b(net.a(x)) + torch.ones(6, 1, 1, 1, dtype=x.dtype), a=conv(), b=conv())
    student = df.rewrite(df.trace(fixed.double().eval(), image(batch=6).double()), df.Plan((), ()))
    assert df.verify(student, df.merge(student)).ok


def test_lack_of_memory_is_not_an_error_of_the_network(monkeypatch):
    student, shallow = folded()

    def lacks(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(first_convolution(shallow), "forward", lacks)
    with pytest.raises(OutOfMemory, match=r"The merged network cannot be verified: .*Tried to allocate 2.00 GiB"):
        df.verify(student, shallow)
