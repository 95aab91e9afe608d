"""Executors that run many independent jobs: in this process, in worker processes, or on a Ray cluster."""

from depthfold.jobs.base import Executor, Failure, Job, Outcome, Work, check_is_executor
from depthfold.jobs.pool import InProcess
from depthfold.jobs.processes import Processes
from depthfold.jobs.ray_cluster import RayCluster

__all__ = ["Executor", "Failure", "InProcess", "Job", "Outcome", "Processes", "RayCluster", "Work", "check_is_executor"]
