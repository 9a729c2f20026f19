"""Inference: the way of a request to a worker, and of its answer back."""
