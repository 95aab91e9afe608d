"""Attempts: how errors of the work become failures."""

import pickle

import pytest
import torch

from depthfold.errors import DepthfoldError, InvalidValue, NotFinite, OutOfMemory
from depthfold.jobs.pool import failure_from, run_attempt, run_setup


def kind_of(raising):
    return run_attempt(raising, None).failure.kind


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
def test_kind_of_failure_follows_from_the_error(error, kind):
    assert kind_of(raising(error)) == kind


def test_memory_error_of_pytorch_is_out_of_memory():
    assert kind_of(lambda _: torch.empty(1 << 60, dtype=torch.uint8)) == "out of memory"


def test_failure_has_type_message_and_location_of_the_error():
    failure = run_attempt(lambda payload: {}[payload], "key").failure
    assert failure.message.startswith("KeyError: 'key' (test_attempt.py, line ")
    assert 'in <lambda>: failure = run_attempt(lambda payload: {}[payload], "key").failure)' in failure.message
    assert str(failure).startswith("error: KeyError")
    assert "\n" not in run_attempt(raising(ValueError("two\nlines")), None).failure.message


def test_failure_from_error_without_traceback():
    assert failure_from(ValueError("bare")).message == "ValueError: bare"
    assert failure_from(MemoryError()).message == "MemoryError"


def test_result_that_cannot_be_pickled_is_a_failure():
    failure = run_attempt(lambda _: lambda: 1, None).failure
    assert failure.kind == "error"
    assert failure.message.startswith("the result is a function, which cannot be pickled: ")
    assert failure.message.endswith("Return plain values: numbers, text, tuples, dicts.")


@pytest.mark.parametrize("error", [InvalidValue, NotFinite, OutOfMemory])
def test_sentences_of_depthfold_are_not_changed(error):
    message = "The value is wrong:\n  it is 3.\nUse another one, " + "and another one, " * 30 + "please."
    assert run_attempt(raising(error(message)), None).failure.message == message


def test_only_cuda_errors_other_than_memory_spoil_a_worker():
    assert run_attempt(raising(RuntimeError("CUDA error: device-side assert triggered")), None).spoiled
    assert not run_attempt(raising(RuntimeError("CUDA error: out of memory")), None).spoiled
    assert not run_attempt(raising(ValueError("seven")), None).spoiled


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_system_exit_and_keyboard_interrupt_are_not_caught(error):
    with pytest.raises(type(error)):
        run_attempt(raising(error), None)


def test_failing_setup_raises_its_error():
    def setup():
        raise ValueError("no data here")

    with pytest.raises(DepthfoldError, match=r"The setup of the jobs failed: ValueError: no data here \(test_attempt"):
        run_setup(setup)


def test_failing_setup_of_depthfold_raises_its_sentences():
    def setup():
        raise InvalidValue("There is no data. Download it.")

    with pytest.raises(DepthfoldError, match=r"The setup of the jobs failed: There is no data\. Download it\. No job "):
        run_setup(setup)


def test_not_finite_keeps_its_attributes_when_pickled():
    error = pickle.loads(pickle.dumps(NotFinite("the loss is nan", step=3, lr=0.1)))
    assert (str(error), error.step, error.lr) == ("the loss is nan", 3, 0.1)
    assert isinstance(error, DepthfoldError)
