"""Turns a model directory, the environment and the command line into typed, frozen settings.

`resolve.resolve_model` is the entry: it reads the directory, merges the layers and checks the result.
"""
