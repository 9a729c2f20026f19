"""The names of LMI's service of TensorRT-LLM. This server has a handler of its own, so they refuse to run."""

from __future__ import annotations

from djl_python.not_here import TENSORRT_LLM, ServiceNotHere, function_not_here


class TRTLLMService(ServiceNotHere):
    instead = TENSORRT_LLM


handle = function_not_here("handle", TENSORRT_LLM)
