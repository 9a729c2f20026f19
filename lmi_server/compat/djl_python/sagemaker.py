"""The names of LMI's service of models that SageMaker's ModelBuilder packs. They refuse to run."""

from __future__ import annotations

from djl_python.not_here import ServiceNotHere, function_not_here

_INSTEAD = "load the model and call it from handle() in a model.py"


class SageMakerInferenceService(ServiceNotHere):
    instead = _INSTEAD


handle = function_not_here("handle", _INSTEAD)
