"""The two tables of a run: as they are in its folder, or measured."""

from __future__ import annotations

from depthfold.backends import Backend, get
from depthfold.core import ImportanceTable, LatencyTable, fingerprint
from depthfold.core.space import Space
from depthfold.importance import measure_importance
from depthfold.jobs import Executor
from depthfold.latency import measure_latency
from depthfold.latency.candidates import network_inputs
from depthfold.latency.notebook import Notebook
from depthfold.progress import Progress
from depthfold.store.run_folder import IMPORTANCE, LATENCY, LATENCY_JOURNAL, RunFolder
from depthfold.tracing import TracedNetwork
from depthfold.training.recipe import Recipe
from depthfold.training.task import Task


def latency_of(
    folder: RunFolder, network: TracedNetwork, target: str | Backend, space: Space, progress: Progress | None
) -> LatencyTable:
    """The run's latency table. One that was finished stays as it is: measured again, it would have learned from what
    choose() has timed since, and another plan might be chosen."""
    environment = get(target).environment(network_inputs(network))
    there = folder.read(LATENCY, LatencyTable)
    same = there is not None and (there.environment, there.fingerprint) == (environment, fingerprint(network))
    journal = folder.path / LATENCY_JOURNAL
    if there is not None and same and {entry.span for entry in there.entries} == set(network.spans(space)):
        if journal.exists():
            with Notebook.open(journal, network, environment):  # refuses what has something else around the same layers
                pass
        return there
    table = measure_latency(network, target, space=space, journal=journal, progress=progress)
    folder.write(LATENCY, table)
    return table


def importance_of(
    folder: RunFolder,
    network: TracedNetwork,
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
        network, task, trainings, space=space, afresh=afresh, executor=executor, run=folder.path, retry=retry,
        progress=progress,
    )  # fmt: skip
    folder.write(IMPORTANCE, table)
    return table
