"""From a model directory, the environment and the command line to typed, frozen settings.

`resolve.resolve_model` is the way in: it reads the directory, merges the layers and checks the result.
Imports `contract` and `machine`, and the options classes of handlers by their names in the table `handlers`.
"""
