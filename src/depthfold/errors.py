"""Every error that depthfold raises on purpose.

One base class, so that `except DepthfoldError` catches all of them. A message says what was found, what was
expected and what to do next.
"""

from __future__ import annotations


class DepthfoldError(Exception):
    """The base of every error that depthfold raises on purpose."""


class InvalidValue(DepthfoldError, ValueError):
    """A noun was asked to hold a state that makes no sense, or a JSON document does not describe one."""


class TraceError(DepthfoldError):
    """The model's own forward cannot be traced, or its example inputs do not run."""


class PlanError(DepthfoldError, ValueError):
    """A plan does not fit the network that it is applied to."""


class VerificationError(DepthfoldError):
    """The merged network does not compute what the rewritten one computes."""


class TableError(DepthfoldError, ValueError):
    """A latency or importance table is incomplete, inconsistent, or belongs to something else."""


class BudgetError(DepthfoldError, ValueError):
    """A budget cannot be read, or no plan meets it."""


class MissingDependency(DepthfoldError, ImportError):
    """An optional package is needed and not installed."""


class BackendError(DepthfoldError, RuntimeError):
    """A runtime rejects a module, or cannot do what it is asked for. The reason fits on one line."""


class OutOfMemory(BackendError):
    """A module does not fit into the memory of the machine or of its accelerator."""


class JournalError(DepthfoldError):
    """A journal cannot be read or written, is damaged, or is in use."""


class DataError(DepthfoldError, ValueError):
    """A dataset is missing, damaged, or not what the task or the model expects."""
