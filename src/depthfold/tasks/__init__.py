"""Built-in tasks: image classification."""

from depthfold.tasks.classification import ClassificationTask, class_scores

__all__ = ["ClassificationTask", "class_scores"]
