"""The names of LMI's service for AWS Inferentia and Trainium, up to 0.33. This server's handler takes its place."""

from __future__ import annotations

from djl_python.not_here import ServiceNotHere, function_not_here

_INSTEAD = "set option.entryPoint=djl_python.transformers_neuronx; handle() in the model.py beside it gets the requests"


class TransformersNeuronXService(ServiceNotHere):
    instead = _INSTEAD


handle = function_not_here("handle", _INSTEAD)
partition = function_not_here("partition", _INSTEAD)
