"""The search of `lmi-server tune`: the values to try, the server that tries them, and the report at the end.

Only `search` needs optuna.
"""
