"""Modules of a transformers model, replaced by ones that make fewer passes over their activations."""
