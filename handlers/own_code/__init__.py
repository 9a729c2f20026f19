"""Serves the user's own code, `model.py`: in LMI's contract (`djl_python`) or in that of `lmi_server.contract.handler`.

Only workers have `djl_python` on their path, so modules that import it are imported when a model loads.
"""
