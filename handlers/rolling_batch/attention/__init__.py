"""Attention of a flat forward pass over the slots of the KV cache."""
