"""Importances that a table already has: only the others are measured when the search space has grown."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import depthfold as df
from depthfold.core import BlockOption
from depthfold.importance.entry import BASE, job_key
from depthfold.jobs import Executor, Job, Outcome


class Known:
    """An executor that answers with the scores of a table, and lets another one measure the rest."""

    def __init__(self, table: df.ImportanceTable, rest: Executor) -> None:
        self.rest = rest
        self.scores = {BASE: table.base} | {
            job_key(BlockOption(entry.span, entry.dropped), seed): score
            for entry in table.entries
            for seed, score in zip(entry.seeds, entry.samples, strict=True)
        }

    def run(self, setup: Any, jobs: Sequence[Job]) -> Generator[Outcome, None, None]:
        for job in jobs:
            if job.key in self.scores:
                yield Outcome(key=job.key, result={"score": self.scores[job.key], "curve": [], "seconds": 0.0})
        yield from self.rest.run(setup, [job for job in jobs if job.key not in self.scores])
