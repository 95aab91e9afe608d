"""From a PyTorch CNN to a Network: what can be merged, and why the rest cannot."""

from depthfold.tracing.keywords import allow_keywords
from depthfold.tracing.trace import trace
from depthfold.tracing.traced import Blueprint, Student, TracedNetwork, expect_traced, student_parts

__all__ = ["Blueprint", "Student", "TracedNetwork", "expect_traced", "student_parts", "trace"]

allow_keywords()  # here, because unpickling a graph imports this package first
