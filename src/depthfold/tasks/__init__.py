"""Built-in tasks: image classification."""

from depthfold.tasks.classification import ClassificationTask, class_scores
from depthfold.tasks.preprocessing import Preprocessing
from depthfold.tasks.source import normalise_images

__all__ = ["ClassificationTask", "Preprocessing", "class_scores", "normalise_images"]
