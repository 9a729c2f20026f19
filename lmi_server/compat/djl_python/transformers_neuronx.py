"""The names of LMI's service for AWS Inferentia and Trainium. This server has no support for them.

LMI had it up to 0.33.
"""

from __future__ import annotations

from djl_python.not_here import ServiceNotHere, function_not_here

_INSTEAD = "this server has no handler for Neuron devices; set option.entryPoint=djl_python.huggingface on CPU or GPU"


class TransformersNeuronXService(ServiceNotHere):
    instead = _INSTEAD


handle = function_not_here("handle", _INSTEAD)
partition = function_not_here("partition", _INSTEAD)
