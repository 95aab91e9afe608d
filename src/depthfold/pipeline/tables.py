"""The two tables of a run: as they are in its folder, or measured."""

from __future__ import annotations

from depthfold.backends import Backend, get
from depthfold.core import Environment, ImportanceTable, LatencyTable, Network
from depthfold.core.network import Space
from depthfold.importance import measure_importance
from depthfold.jobs import Executor
from depthfold.latency import measure_latency
from depthfold.latency.notebook import Notebook
from depthfold.progress import Progress
from depthfold.store.run_folder import IMPORTANCE, LATENCY, LATENCY_JOURNAL, RunFolder
from depthfold.tracing import TracedNetwork
from depthfold.training import Recipe, Task


def latency_of(
    folder: RunFolder,
    traced: TracedNetwork,
    target: str | Backend,
    space: Space,
    progress: Progress | None,
    *,
    retry: bool = False,
) -> LatencyTable:
    """The run's latency table. One that was finished stays as it is: measured again, it would have learned from what
    choose() has timed since, and another plan might be chosen. With `retry`, what has a reason in it is tried once
    more, and the table is a new one if that has given any of it a time."""
    environment = get(target).environment(traced.example_tensors())
    there = folder.read(LATENCY, LatencyTable)
    if there is not None and not _holds(there, traced.network, environment, space):
        there = None
    journal = folder.path / LATENCY_JOURNAL
    if there is not None and not (retry and len(there.times) < len(there.entries)):
        if journal.exists():
            with Notebook.open(journal, traced, environment):  # refuses what has something else around the same layers
                pass
        return there
    table = measure_latency(traced, target, space=space, journal=journal, retry=retry, progress=progress)
    if there is not None and table.times.keys() == there.times.keys():
        return there
    folder.write(LATENCY, table)
    return table


def _holds(table: LatencyTable, network: Network, environment: Environment, space: Space) -> bool:
    """Whether it is a table of this network here, with every span of the search space."""
    own = (table.environment, table.fingerprint) == (environment, network.fingerprint)
    return own and {entry.span for entry in table.entries} == set(network.spans(space))


def importance_of(
    folder: RunFolder,
    traced: TracedNetwork,
    task: Task,
    trainings: Recipe | str,
    space: Space,
    afresh: bool,
    executor: Executor | None,
    retry: bool,
    progress: Progress | None,
) -> ImportanceTable:
    """The run's importance table: what its journal lacks is trained."""
    table = measure_importance(
        traced, task, trainings, space=space, afresh=afresh, executor=executor, run=folder.path, retry=retry,
        progress=progress,
    )  # fmt: skip
    folder.write(IMPORTANCE, table)
    return table
