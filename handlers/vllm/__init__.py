"""vLLM: text generation, pooling models, and LMI-Dist (vLLM over the ranks of an MPI group).

Handlers and options (`*handler.py`, `*options.py`) do not import vLLM. The other modules do, and a handler imports them
when its model loads. Only `library.py`, `compiled_code.py` and `ranks.py` name vLLM's modules.
"""
