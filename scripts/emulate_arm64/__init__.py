"""Runs kernels and a tiny model on an emulated 64-bit Arm processor; see `prepare.sh` and `checks.py`."""
