"""Reads Hugging Face checkpoints with transformers for every handler that needs it.

Modules beside `options.py` import torch and are imported when a model loads.
"""
