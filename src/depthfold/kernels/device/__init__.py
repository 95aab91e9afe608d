"""Triton code: it is compiled for the GPU, and never runs as Python except in Triton's interpreter."""
