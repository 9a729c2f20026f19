"""Reads the layers of a model, chooses its handler, and merges the layers under the keys of that handler."""
