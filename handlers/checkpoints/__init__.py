"""Loads Hugging Face checkpoints with transformers, for every handler that needs one.

All modules except `options.py`, `rotary.py` and `saving.py` import torch; handlers import them when a model loads.
"""
