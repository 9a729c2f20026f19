"""Prints configurations for people: `lmi-server explain` and `check`, and the reference page docs/configuration.md.

Imports `configuration`, `machine`, `contract`, and the command line of a worker from `supervisor`.
"""
