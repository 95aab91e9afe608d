"""Merge a rewritten network into a shallow one, and verify the result."""

from depthfold.merging.cleaning import use_plain_layers
from depthfold.merging.kernels import empty_module, random_module
from depthfold.merging.merge import build_shallow, merge, replace_segment, sketch
from depthfold.merging.output_errors import SENSITIVITY_FACTOR, TOLERANCE, output_error, sensitivity, tensor_error
from depthfold.merging.shallow import Shallow, shallow_parts
from depthfold.merging.verify import Verification, verify

__all__ = [
    "SENSITIVITY_FACTOR", "TOLERANCE", "Shallow", "Verification", "build_shallow", "empty_module", "merge",
    "output_error", "random_module", "replace_segment", "sensitivity", "shallow_parts", "sketch", "tensor_error",
    "use_plain_layers", "verify",
]  # fmt: skip
