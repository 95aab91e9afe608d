"""The rules of retries by themselves, and a crew that exists on paper only, under random misfortune."""

import pickle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthfold.errors import DepthfoldError, InvalidValue
from depthfold.jobs import Failure, Job
from depthfold.jobs.pool import Answer, Answered, Lost, Queue, Ready, again, drive


def jobs(*keys):
    return [Job(key=key, payload=None) for key in keys]


def failed(kind):
    return Answer(failure=Failure(kind=kind, message="on purpose"), seconds=0.5)


DONE = Answer(result=pickle.dumps(42), seconds=0.25)


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
        (["out of memory", "worker lost"], "alone"),  # it is still too large for company
        (["out of memory", "worker lost", "worker lost"], None),
        (["out of memory", "worker lost", "out of memory"], None),
        (["worker lost", "error"], None),
    ],
)
def test_who_gets_another_attempt(kinds, place):
    assert again(kinds) == place


def test_a_lost_job_goes_to_the_end_and_counts_its_attempts():
    queue = Queue(jobs("a", "b", "c"))
    assert queue.take().key == "a"
    assert queue.answered("a", failed("worker lost")) is None
    assert [queue.take().key for _ in range(3)] == ["b", "c", "a"]
    outcome = queue.answered("a", DONE)
    assert (outcome.result, outcome.failure, outcome.attempts, outcome.seconds) == (42, None, 2, 0.25)
    assert not queue.done


def test_a_job_that_lacks_memory_waits_until_nothing_runs():
    queue = Queue(jobs("large", "b", "large too"))
    queue.take(), queue.take(), queue.take()
    assert queue.answered("large", failed("out of memory")) is None
    assert queue.answered("large too", failed("out of memory")) is None
    assert queue.take() is None  # b runs
    assert not queue.alone
    assert queue.answered("b", DONE).attempts == 1
    assert queue.alone
    assert queue.take().key == "large"
    assert queue.take() is None  # the other one must wait for it
    assert queue.answered("large", failed("out of memory")).attempts == 2
    assert queue.take().key == "large too"
    assert queue.answered("large too", DONE).attempts == 2
    assert queue.done


def test_a_result_that_cannot_be_read_here_fails_its_job_alone():
    queue = Queue(jobs("a"))
    queue.take()
    outcome = queue.answered("a", Answer(result=b"cno_such_module\nThing\n."))
    assert outcome.failure.kind == "error"
    assert "No module named 'no_such_module'" in outcome.failure.message


def test_two_jobs_of_one_key():
    with pytest.raises(InvalidValue, match=r"Several jobs have the key 'b'; expected a key for each. Give each job a"):
        Queue(jobs("a", "b", "c", "b"))


class PaperCrew:
    """Workers are numbers. What happens next is drawn at random; every rule is checked against what was seen."""

    def __init__(self, rng, stillborn=0.2):
        self.rng, self.stillborn = rng, stillborn
        self.starting, self.idle, self.busy, self.hired = set(), set(), {}, 0
        self.seen, self.most = {}, 0

    def size(self):
        return self.rng.randint(0, 3)  # nodes come and go

    def hire(self):
        self.hired += 1
        self.starting.add(self.hired)
        return self.hired

    def pack(self, payload):
        if payload == "cannot be sent":
            raise TypeError("cannot pickle this")
        return payload

    def give(self, worker, payload):
        self.idle.remove(worker)  # KeyError: it is lost, dismissed or busy
        key = payload
        if "out of memory" in self.seen.setdefault(key, []):
            assert not self.busy and not self.idle and not self.starting, "it must have the machine to itself"
        assert not any("out of memory" in self.seen[other] for other in self.busy.values()), "it must be left alone"
        assert key not in self.busy.values()
        self.busy[worker] = key
        self.most = max(self.most, len(self.busy))

    def dismiss(self, workers):
        for worker in workers:
            assert worker not in self.busy
            self.starting.discard(worker)
            self.idle.discard(worker)

    def events(self):
        everyone = sorted(self.starting | self.idle | set(self.busy))
        if not everyone or self.rng.random() < 0.1:
            return
        worker = self.rng.choice(everyone)
        if worker in self.starting:
            self.starting.remove(worker)
            if self.rng.random() < self.stillborn:
                yield Lost(worker=worker, how="stillborn")
            else:
                self.idle.add(worker)
                yield Ready(worker=worker)
        elif worker in self.idle:
            self.idle.remove(worker)
            yield Lost(worker=worker, how="died in its sleep")
        else:
            yield self._finished(worker, self.busy.pop(worker))

    def _finished(self, worker, key):
        kind = self.rng.choice(["fine", "fine", "error", "out of memory", "worker lost", "not finite", "spoiled"])
        self.seen[key].append(kind)
        if kind == "worker lost":
            return Lost(worker=worker, how="died at work")
        if kind != "spoiled":
            self.idle.add(worker)
            answer = Answer(result=pickle.dumps(key)) if kind == "fine" else failed(kind)
            return Answered(worker=worker, answer=answer)
        answer = Answer(failure=Failure(kind="error", message="CUDA error"), spoiled=True)
        return Answered(worker=worker, answer=answer)


@given(seed=st.integers(0, 10**6), number=st.integers(1, 12))
def test_whatever_happens_each_job_has_one_outcome_and_its_due_attempts(seed, number):
    crew = PaperCrew(Random(seed), stillborn=0.0)
    keys = [f"job {n}" for n in range(number)]
    outcomes = list(drive(Queue([Job(key=key, payload=key) for key in keys]), crew))
    assert sorted(outcome.key for outcome in outcomes) == sorted(keys)
    for outcome in outcomes:
        seen = crew.seen[outcome.key]
        assert outcome.attempts == len(seen)
        assert seen.count("out of memory") <= 2
        if seen[-1] == "fine":
            assert (outcome.result, outcome.failure) == (outcome.key, None)
        else:
            assert outcome.failure.kind == ("error" if seen[-1] == "spoiled" else seen[-1])
        assert not set(seen[:-1]) & {"fine", "error", "not finite", "spoiled"}  # nothing of this is tried again
        if outcome.failure and outcome.failure.kind == "worker lost":
            assert len(seen) >= 3


def test_the_crew_is_used_to_the_full():
    crew = PaperCrew(Random(1), stillborn=0.0)
    crew.size = lambda: 3
    list(drive(Queue([Job(key=str(n), payload=str(n)) for n in range(30)]), crew))
    assert crew.most == 3


def test_workers_that_always_die_in_their_setup_end_the_run():
    crew = PaperCrew(Random(0), stillborn=1.0)
    crew.size = lambda: 2
    with pytest.raises(DepthfoldError, match=r"6 workers in a row were lost in the setup .* the last one: stillborn"):
        list(drive(Queue(jobs("a", "b", "c")), crew))


def test_a_payload_that_cannot_be_sent_fails_its_job_alone():
    crew = PaperCrew(Random(3), stillborn=0.0)
    crew.rng.choice = lambda options: options[0]  # the first worker, and all goes well
    payloads = ["a", "cannot be sent", "b"]
    outcomes = {o.key: o for o in drive(Queue([Job(key=p, payload=p) for p in payloads]), crew)}
    assert outcomes["cannot be sent"].failure.kind == "error"
    assert "TypeError: cannot pickle this" in outcomes["cannot be sent"].failure.message
    assert outcomes["a"].result == "a"
    assert outcomes["b"].result == "b"
