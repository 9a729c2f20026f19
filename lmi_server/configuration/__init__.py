"""From a model directory, the environment and the command line to typed, frozen settings.

`resolve.resolve_model` is the way in: it reads the directory, puts the layers on top of each other and checks what
comes out.
"""
