"""The names of the LLM API."""

from tensorrt_llm.executor import CompletionOutput, LoRARequest, RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.llmapi.llm_args import (
    BuildConfig,
    CalibConfig,
    CudaGraphConfig,
    ExtendedRuntimePerfKnobConfig,
    KvCacheConfig,
    MoeConfig,
    QuantAlgo,
    QuantConfig,
    SchedulerConfig,
    TorchLlmArgs,
    TrtLlmArgs,
)
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "BuildConfig",
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
    "TrtLlmArgs",
]
