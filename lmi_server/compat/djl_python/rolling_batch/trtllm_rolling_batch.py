"""The name of LMI's rolling batch over TensorRT-LLM. This server has its own, so the class refuses."""

from __future__ import annotations

from typing import Any

from djl_python.not_here import TENSORRT_LLM, not_here
from djl_python.rolling_batch.rolling_batch import RollingBatch


class TRTLLMRollingBatch(RollingBatch):
    """Cannot be made."""

    def __init__(self, model_id_or_path: str, properties: dict[str, Any], configs: Any) -> None:
        not_here(type(self).__name__, TENSORRT_LLM)

    def inference(self, new_requests: list[Any]) -> list[dict[str, Any]]:
        not_here(type(self).__name__, TENSORRT_LLM)

    def preprocess_requests(self, requests: list[Any]) -> Any:
        not_here(type(self).__name__, TENSORRT_LLM)
