"""What this computer has: processors, GPUs, memory, MPI launchers, environment variables, process trees.

`model_imports.py` says how a process that loads a model imports the libraries for it; `shorter_imports.py` has what
transformers then need not do. `whole_files.py` writes files whole or not at all.
"""
