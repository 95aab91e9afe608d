"""From a PyTorch CNN to a Network: what can be merged, and why the rest cannot."""

from depthfold.tracing.inputs import ExampleInputs
from depthfold.tracing.trace import allow_keywords, trace
from depthfold.tracing.traced import Blueprint, Student, TracedNetwork, expect_traced, student_parts
from depthfold.tracing.weights import device_of, dtype_of

__all__ = [
    "Blueprint",
    "ExampleInputs",
    "Student",
    "TracedNetwork",
    "device_of",
    "dtype_of",
    "expect_traced",
    "student_parts",
    "trace",
]

allow_keywords()  # here, because unpickling a graph imports this package first
