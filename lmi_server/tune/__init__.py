"""The search of `lmi-server tune`: which values are tried, the server that tries them, and what is written at the end.

Only `search` needs optuna.
"""
