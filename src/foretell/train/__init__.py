"""Trains drafters: prompts, answers and states of the target, losses, the trainer, checkpoints."""
