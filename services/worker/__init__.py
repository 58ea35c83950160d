"""The worker service: loads a model and executes the steps that a scheduler plans."""
