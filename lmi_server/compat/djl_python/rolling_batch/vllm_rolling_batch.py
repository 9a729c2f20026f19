"""The names of LMI's rolling batch over vLLM. The server's own handler drives the engine, so the class refuses."""

from __future__ import annotations

import importlib
from typing import Any

from djl_python.not_here import VLLM_BATCH, not_here
from djl_python.rolling_batch.rolling_batch import RollingBatch


class VLLMRollingBatch(RollingBatch):
    """Cannot be made."""

    def __init__(self, model_id_or_path: str, properties: dict[str, Any], **kwargs: Any) -> None:
        not_here(type(self).__name__, VLLM_BATCH)

    def inference(self, new_requests: list[Any]) -> list[dict[str, Any]]:
        not_here(type(self).__name__, VLLM_BATCH)

    def preprocess_requests(self, requests: list[Any]) -> Any:
        not_here(type(self).__name__, VLLM_BATCH)


def __getattr__(name: str) -> Any:
    """Return the names of vLLM's sampling parameters, which import vLLM."""
    if name != "VLLM_GENERATION_PARAMS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return set(importlib.import_module("vllm.sampling_params").SamplingParams.__struct_fields__)
