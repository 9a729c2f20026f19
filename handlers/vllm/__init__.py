"""vLLM: text generation, pooling models, and LMI-Dist (vLLM over the ranks of an MPI group).

Modules beside the `*handler.py` and `*options.py` import vLLM and are imported when a model loads.
"""
