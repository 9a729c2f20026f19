"""Checks and measures this project on a machine with a GPU by NVIDIA; see `__main__`."""
