"""Environments of engines: what a model asks for is installed by uv beside the server's packages, and kept.

recipe.py        what a model asks for, and which lines of a requirements file are taken
uv.py            runs uv with pip's settings
environment.py   makes an environment, or finds it
room.py          which environments are in use, and the removal of the others
"""
