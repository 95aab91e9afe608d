"""The demo: a small network and a part of Fashion-MNIST that ship with the package, compressed for this machine."""

from depthfold.demo.shipped import importance, model, task

__all__ = ["importance", "model", "task"]
