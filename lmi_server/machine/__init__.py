"""What this computer has: processors, GPUs, memory, MPI launchers, environment variables, process trees.

Imports only `contract`.
"""
