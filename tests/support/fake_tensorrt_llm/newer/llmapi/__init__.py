"""The names of the LLM API in a version without engines of TensorRT."""

from tensorrt_llm.executor import CompletionOutput, LoRARequest, RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    CalibConfig,
    CudaGraphConfig,
    ExtendedRuntimePerfKnobConfig,
    KvCacheConfig,
    MoeConfig,
    QuantAlgo,
    QuantConfig,
    SchedulerConfig,
    TorchLlmArgs,
)
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CalibConfig",
    "CompletionOutput",
    "CudaGraphConfig",
    "ExtendedRuntimePerfKnobConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "MoeConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]
