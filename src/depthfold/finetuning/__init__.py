"""Fine-tuning: the student recovers what the removed activations cost it."""

from depthfold.finetuning.finetune import finetune

__all__ = ["finetune"]
