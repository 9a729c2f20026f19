"""vLLM: text generation, pooling models, and LMI-Dist (vLLM over the ranks of an MPI group).

The handlers and options here do not import vLLM. The folders do, and a handler imports them when its model loads:

    requests/       a request on its way to the engine and back
    engine/         the engine: loading, driving, ranks, adapters, statistics
    compilation/    compiled code on the CPU, made in the background

Only `library.py`, `differences.py`, `compilation/stored_code.py`, `engine/ranks.py` and `requests/media.py` name vLLM's
modules. `interface.py` says which versions the handlers run with, and what they use of them.
"""
