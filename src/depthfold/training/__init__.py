"""Training: the task that the user plugs in, the recipe, and one loop for importances and fine-tuning."""
