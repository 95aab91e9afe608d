"""What an attempt makes of whatever the work raises."""

import pickle

import pytest
import torch

from depthfold.errors import DepthfoldError, NotFinite, OutOfMemory
from depthfold.jobs.pool import attempt, begin, failure_of


def kind_of(raising):
    return attempt(raising, None).failure.kind


def raising(error):
    def work(_):
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NotFinite("the loss is nan", step=3), "not finite"),
        (MemoryError(), "out of memory"),
        (OutOfMemory("TensorRT is out of memory"), "out of memory"),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), "out of memory"),
        (torch.cuda.OutOfMemoryError("Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (ZeroDivisionError("division by zero"), "error"),
        (ArithmeticError("an ordinary one"), "error"),
    ],
)
def test_kinds(error, kind):
    assert kind_of(raising(error)) == kind


def test_pytorch_itself_out_of_memory():
    assert kind_of(lambda _: torch.empty(1 << 60, dtype=torch.uint8)) == "out of memory"


def test_an_error_is_told_with_its_type_its_message_and_its_place():
    failure = attempt(lambda payload: {}[payload], "key").failure
    assert failure.message.startswith("KeyError: 'key' (test_attempt.py, line ")
    assert 'in <lambda>: failure = attempt(lambda payload: {}[payload], "key").failure)' in failure.message
    assert str(failure).startswith("error: KeyError")
    assert "\n" not in attempt(raising(ValueError("two\nlines")), None).failure.message


def test_an_error_without_a_traceback():
    assert failure_of(ValueError("bare")).message == "ValueError: bare"
    assert failure_of(MemoryError()).message == "MemoryError"


def test_a_result_that_cannot_be_pickled():
    failure = attempt(lambda _: lambda: 1, None).failure
    assert failure.kind == "error"
    assert failure.message.startswith("the result is a function, which cannot be pickled: ")
    assert failure.message.endswith("Return plain values: numbers, text, tuples, dicts.")


def test_only_cuda_errors_other_than_memory_spoil_a_worker():
    assert attempt(raising(RuntimeError("CUDA error: device-side assert triggered")), None).spoiled
    assert not attempt(raising(RuntimeError("CUDA error: out of memory")), None).spoiled
    assert not attempt(raising(ValueError("seven")), None).spoiled


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_is_meant_for_the_process_is_not_caught(error):
    with pytest.raises(type(error)):
        attempt(raising(error), None)


def test_a_setup_that_fails():
    def setup():
        raise ValueError("no data here")

    with pytest.raises(DepthfoldError, match=r"The setup of the jobs failed: ValueError: no data here \(test_attempt"):
        begin(setup)


def test_not_finite_keeps_its_facts_on_the_way_between_processes():
    error = pickle.loads(pickle.dumps(NotFinite("the loss is nan", step=3, lr=0.1)))
    assert (str(error), error.step, error.lr) == ("the loss is nan", 3, 0.1)
    assert isinstance(error, DepthfoldError)
