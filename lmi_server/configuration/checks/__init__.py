"""Checks the values of a model and their combinations, its checkpoint, and what secure mode allows."""
