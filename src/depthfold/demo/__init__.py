"""The demo: a small network and a part of Fashion-MNIST that ship with the package, compressed for this machine."""

from depthfold.demo.demo import demo_settings, model, run_demo
from depthfold.demo.network import task

__all__ = ["demo_settings", "model", "run_demo", "task"]
