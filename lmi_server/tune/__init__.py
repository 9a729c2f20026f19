"""The search of `lmi-server tune`: which values are tried, the server that tries them, and what is written at the end.

Imports `contract`, `machine`, `configuration` and `bench`. Only `search` needs optuna.
"""
