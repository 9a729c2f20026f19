"""Processes that share a model: their communication, and the weights that each of them holds."""
