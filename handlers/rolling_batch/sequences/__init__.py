"""Passes of models whose attention is their own: sequence by sequence, with a cache of transformers over the slots."""
