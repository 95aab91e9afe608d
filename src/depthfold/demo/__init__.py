"""The demo: a small network and a part of Fashion-MNIST that ship with the package, compressed for this machine."""

from depthfold.demo.demo import demo_settings, importance, model, run_demo, task

__all__ = ["demo_settings", "importance", "model", "run_demo", "task"]
