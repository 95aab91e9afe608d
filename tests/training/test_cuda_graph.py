"""The order of calls around a capture, with a stand-in for torch.cuda. tests/e2e/test_captured_steps.py uses a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from depthfold.training import cuda_graph
from depthfold.training.cuda_graph import CannotCapture, record_cuda_graph

DEVICE = torch.device("cuda", 0)
AROUND = ["capture stream waits", "current stream waits"]


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        assert other.name != self.name
        self.calls.append(f"{self.name} waits")


class Generator:
    def clone_state(self):
        return "copy"

    def graphsafe_set_state(self, state):
        self.state = state


class Card:
    """A stand-in for torch.cuda that logs calls. Like PyTorch, it knows whether a capture is under way."""

    def __init__(self, monkeypatch):
        self.calls, self.mode, self.under_way, self.free, self.invalid = [], 0, None, 100, False
        self.generator = Generator()
        cuda_graph._capture_stream.cache_clear()
        for name, stand_in in {
            "Stream": lambda device: Stream("capture stream", self.calls),
            "current_stream": lambda device: Stream("current stream", self.calls),
            "stream": lambda stream: contextlib.nullcontext(),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "memory_reserved": lambda device: 70,
            "memory_allocated": lambda device: 10,
            "mem_get_info": lambda device: (self.free, 200),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: self,
            "default_generators": (self.generator,),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self.calls.append("release pool"))

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.calls.append("begin")
        self.under_way = pool

    def capture_end(self):
        self.calls.append("end")
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.under_way = None

    def reset(self):
        self.calls.append("reset")

    def end_allocation(self, device, pool):
        if self.under_way != pool:
            raise RuntimeError("not currently recording to mempool_id")
        self.under_way = None

    def body(self):
        """Log the call, and the mode in which PyTorch reports operations that wait for the device."""
        self.calls.append(f"body in mode {self.mode}")


@pytest.fixture
def card(monkeypatch):
    yield Card(monkeypatch)
    cuda_graph._capture_stream.cache_clear()


def test_the_body_runs_once_before_it_is_captured(card):
    assert record_cuda_graph(card.body, DEVICE) is card
    assert card.calls == [AROUND[0], "body in mode error", "begin", "body in mode 0", "end", AROUND[1]]
    assert not hasattr(card.generator, "state")


@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_times_its_algorithms_until_the_step_is_captured(card, monkeypatch, setting, deterministic):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", setting)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    seen = []
    record_cuda_graph(lambda: seen.append(torch.backends.cudnn.benchmark), DEVICE)
    assert (seen, torch.backends.cudnn.benchmark) == ([setting or not deterministic] * 2, setting)


def test_the_setting_of_cudnn_is_restored_after_an_error(card, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with pytest.raises(CannotCapture):
        record_cuda_graph(lambda: torch.rand(1), DEVICE)
    assert torch.backends.cudnn.benchmark is False


def test_cached_memory_is_freed_if_the_capture_may_need_it(card):
    card.free = 74
    record_cuda_graph(card.body, DEVICE)
    assert card.calls[1:4] == ["body in mode error", "empty cache", "begin"]


def test_a_step_that_waits_for_the_device_is_not_captured(card):
    def waits():
        if card.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(CannotCapture, match=r"^the step waits for the device, for example in Tensor.item\(\)$"):
        record_cuda_graph(waits, DEVICE)
    assert (card.calls, card.mode) == (AROUND, 0)


def test_other_errors_of_the_warm_up_are_raised(card):
    def fails():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        record_cuda_graph(fails, DEVICE)
    assert (card.calls, card.mode) == (AROUND, 0)


def test_a_step_that_draws_on_the_cpu_is_not_captured(card):
    with pytest.raises(CannotCapture, match=r"^the step draws random numbers on the CPU$"):
        record_cuda_graph(lambda: torch.rand(1), DEVICE)
    assert card.calls == AROUND


@pytest.mark.parametrize("invalid", [True, False])
def test_an_error_in_the_capture_is_raised_and_cleaned_up(card, invalid):
    """If the error made the capture invalid, capture_end() fails as well."""
    card.invalid = invalid

    def fails():
        card.body()
        if card.under_way is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=r"^operation not permitted when stream is capturing$"):
        record_cuda_graph(fails, DEVICE)
    rest = ["release pool"] if invalid else []  # otherwise the graph owned the pool, and reset() released it
    assert card.calls[2:] == ["begin", "body in mode 0", "end", "reset", *rest, AROUND[1]]
    assert card.under_way is None
    assert card.generator.state == "copy"


def test_an_error_at_the_end_of_the_capture_is_cleaned_up(card):
    card.invalid = True
    with pytest.raises(RuntimeError, match=r"^operation failed due to a previous error during capture$"):
        record_cuda_graph(card.body, DEVICE)
    assert card.under_way is None
    assert card.generator.state == "copy"
