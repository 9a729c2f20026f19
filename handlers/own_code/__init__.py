"""Serves the user's own code, `model.py`: written for LMI (`djl_python`) or for `lmi_server.contract.handler`.

Only workers have `djl_python` on their path, so modules that import it are imported when a model loads.
"""
