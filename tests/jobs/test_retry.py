"""The rules for retries, and the scheduling of jobs in a simulated pool with random failures."""

import pickle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.jobs import Failure, Job
from depthfold.jobs.pool import Attempt, Finished, Lost, Queue, Ready, decide_retry, run_jobs


def jobs(*keys):
    return [Job(key=key, payload=None) for key in keys]


def failed(kind):
    return Attempt(failure=Failure(kind=kind, message="on purpose"), seconds=0.5)


DONE = Attempt(result=pickle.dumps(42), seconds=0.25)


@pytest.mark.parametrize(
    ("kinds", "place"),
    [
        (["error"], None),
        (["not finite"], None),
        (["worker lost"], "queue"),
        (["worker lost"] * 2, "queue"),
        (["worker lost"] * 3, None),
        (["out of memory"], "alone"),
        (["out of memory"] * 2, None),
        (["worker lost", "out of memory"], "alone"),
        (["out of memory", "worker lost"], "alone"),  # it still does not fit beside others
        (["out of memory", "worker lost", "worker lost"], None),
        (["out of memory", "worker lost", "out of memory"], None),
        (["worker lost", "error"], None),
    ],
)
def test_retry_depends_on_the_failures(kinds, place):
    assert decide_retry(kinds) == place


def test_lost_job_is_queued_again_and_counts_its_attempts():
    queue = Queue(jobs("a", "b", "c"))
    assert queue.take().key == "a"
    assert queue.finish("a", failed("worker lost")) is None
    assert [queue.take().key for _ in range(3)] == ["b", "c", "a"]
    outcome = queue.finish("a", DONE)
    assert (outcome.result, outcome.failure, outcome.attempts, outcome.seconds) == (42, None, 2, 0.25)
    assert not queue.done


def test_job_without_memory_waits_until_no_other_job_runs():
    queue = Queue(jobs("large", "b", "large 2"))
    queue.take(), queue.take(), queue.take()
    assert queue.finish("large", failed("out of memory")) is None
    assert queue.finish("large 2", failed("out of memory")) is None
    assert queue.take() is None  # b is running
    assert not queue.alone
    assert queue.finish("b", DONE).attempts == 1
    assert queue.alone
    assert queue.take().key == "large"
    assert queue.take() is None  # the other one must wait for it
    assert queue.finish("large", failed("out of memory")).attempts == 2
    assert queue.take().key == "large 2"
    assert queue.finish("large 2", DONE).attempts == 2
    assert queue.done


def test_result_that_cannot_be_unpickled_fails_only_its_job():
    queue = Queue(jobs("a"))
    queue.take()
    outcome = queue.finish("a", Attempt(result=b"cno_such_module\nThing\n."))
    assert outcome.failure.kind == "error"
    assert "No module named 'no_such_module'" in outcome.failure.message


def test_repeated_key_is_refused():
    with pytest.raises(InvalidValue, match=r"Several jobs have the key 'b'. Give each job a"):
        Queue(jobs("a", "b", "c", "b"))


class SimulatedPool:
    """A pool whose workers are numbers and whose events are random. It checks every rule of scheduling."""

    def __init__(self, rng, lost_in_setup=0.2):
        self.rng, self.lost_in_setup = rng, lost_in_setup
        self.starting, self.idle, self.busy, self.started = set(), set(), {}, 0
        self.seen, self.most = {}, 0

    def size(self):
        return self.rng.randint(0, 3)  # nodes come and go

    def start(self):
        self.started += 1
        self.starting.add(self.started)
        return self.started

    def pack(self, payload):
        if payload == "cannot be sent":
            raise TypeError("cannot pickle this")
        return payload

    def submit(self, worker, payload):
        self.idle.remove(worker)  # KeyError if it is lost, stopped or busy
        key = payload
        if "out of memory" in self.seen.setdefault(key, []):
            assert not self.busy and not self.idle and not self.starting, "it must run alone"
        assert not any("out of memory" in self.seen[other] for other in self.busy.values()), "nothing may run beside it"
        assert key not in self.busy.values()
        self.busy[worker] = key
        self.most = max(self.most, len(self.busy))

    def stop(self, workers):
        for worker in workers:
            assert worker not in self.busy
            self.starting.discard(worker)
            self.idle.discard(worker)

    def events(self):
        workers = sorted(self.starting | self.idle | set(self.busy))
        if not workers or self.rng.random() < 0.1:
            return
        worker = self.rng.choice(workers)
        if worker in self.starting:
            self.starting.remove(worker)
            if self.rng.random() < self.lost_in_setup:
                yield Lost(worker=worker, reason="lost in setup")
            else:
                self.idle.add(worker)
                yield Ready(worker=worker)
        elif worker in self.idle:
            self.idle.remove(worker)
            yield Lost(worker=worker, reason="died while idle")
        else:
            yield self._finished(worker, self.busy.pop(worker))

    def _finished(self, worker, key):
        kind = self.rng.choice(["fine", "fine", "error", "out of memory", "worker lost", "not finite", "spoiled"])
        self.seen[key].append(kind)
        if kind == "worker lost":
            return Lost(worker=worker, reason="died while busy")
        if kind != "spoiled":
            self.idle.add(worker)
            attempt = Attempt(result=pickle.dumps(key)) if kind == "fine" else failed(kind)
            return Finished(worker=worker, attempt=attempt)
        attempt = Attempt(failure=Failure(kind="error", message="CUDA error"), spoiled=True)
        return Finished(worker=worker, attempt=attempt)


@given(seed=st.integers(0, 10**6), number=st.integers(1, 12))
def test_each_job_has_one_outcome_and_the_right_number_of_attempts(seed, number):
    pool = SimulatedPool(Random(seed), lost_in_setup=0.0)
    keys = [f"job {n}" for n in range(number)]
    outcomes = list(run_jobs(Queue([Job(key=key, payload=key) for key in keys]), pool))
    assert sorted(outcome.key for outcome in outcomes) == sorted(keys)
    for outcome in outcomes:
        seen = pool.seen[outcome.key]
        assert outcome.attempts == len(seen)
        assert seen.count("out of memory") <= 2
        if seen[-1] == "fine":
            assert (outcome.result, outcome.failure) == (outcome.key, None)
        else:
            assert outcome.failure.kind == ("error" if seen[-1] == "spoiled" else seen[-1])
        assert not set(seen[:-1]) & {"fine", "error", "not finite", "spoiled"}  # none of these is retried
        if outcome.failure and outcome.failure.kind == "worker lost":
            assert len(seen) >= 3


def test_all_workers_of_the_pool_are_used():
    pool = SimulatedPool(Random(1), lost_in_setup=0.0)
    pool.size = lambda: 3
    list(run_jobs(Queue([Job(key=str(n), payload=str(n)) for n in range(30)]), pool))
    assert pool.most == 3


def test_run_ends_if_every_worker_dies_during_setup():
    pool = SimulatedPool(Random(0), lost_in_setup=1.0)
    pool.size = lambda: 2
    with pytest.raises(
        DepthfoldError, match=r"6 workers in a row were lost during setup.* the last one: lost in setup"
    ):
        list(run_jobs(Queue(jobs("a", "b", "c")), pool))


def test_payload_that_cannot_be_pickled_fails_only_its_job():
    pool = SimulatedPool(Random(3), lost_in_setup=0.0)
    pool.rng.choice = lambda options: options[0]  # always the first worker, and every job succeeds
    payloads = ["a", "cannot be sent", "b"]
    outcomes = {o.key: o for o in run_jobs(Queue([Job(key=p, payload=p) for p in payloads]), pool)}
    assert outcomes["cannot be sent"].failure.kind == "error"
    assert "TypeError: cannot pickle this" in outcomes["cannot be sent"].failure.message
    assert outcomes["a"].result == "a"
    assert outcomes["b"].result == "b"
