"""Fine-tuning: the student recovers what the removed activations cost it."""

from depthfold.finetuning.finetune import finetune, finetuned

__all__ = ["finetune", "finetuned"]
