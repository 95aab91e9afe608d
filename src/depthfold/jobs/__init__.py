"""Jobs: run many independent ones, in process, in processes of this machine, or on a Ray cluster."""

from depthfold.jobs.base import Executor, Failure, Job, Outcome
from depthfold.jobs.in_process import InProcess
from depthfold.jobs.processes import Processes
from depthfold.jobs.ray_cluster import RayCluster

__all__ = ["Executor", "Failure", "InProcess", "Job", "Outcome", "Processes", "RayCluster"]
