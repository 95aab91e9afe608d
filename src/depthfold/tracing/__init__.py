"""Trace a PyTorch CNN to a Network: which layers can be merged, and why the rest cannot."""

from depthfold.tracing.inputs import ExampleInputs, inputs_at
from depthfold.tracing.random_numbers import SeedFunction, fork_rng
from depthfold.tracing.trace import allow_keywords, trace
from depthfold.tracing.traced import Blueprint, Student, TracedNetwork, require_traced, student_parts
from depthfold.tracing.tracer import describe_error
from depthfold.tracing.weights import device_of, digest_tensors, dtype_of, free_weights

__all__ = [
    "Blueprint", "ExampleInputs", "SeedFunction", "Student", "TracedNetwork", "describe_error", "device_of",
    "digest_tensors", "dtype_of", "fork_rng", "free_weights", "inputs_at", "require_traced", "student_parts", "trace",
]  # fmt: skip

allow_keywords()  # here, because unpickling a graph imports this package first
