"""The names of LMI's conversions between its requests and TensorRT-LLM's. They refuse to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from djl_python.not_here import TENSORRT_LLM, function_not_here


@dataclass
class ProcessedRequest:
    """A request with the functions that run it and that write its answer."""

    trtllm_request: Any
    inference_invoker: Callable[..., Any]
    non_stream_output_formatter: Callable[..., Any]
    stream_output_formatter: Callable[..., Any]
    accumulate_chunks: bool
    include_prompt: bool


convert_lmi_schema_to_completion_request = function_not_here("convert_lmi_schema_to_completion_request", TENSORRT_LLM)
convert_completion_response_to_lmi_schema = function_not_here("convert_completion_response_to_lmi_schema", TENSORRT_LLM)
convert_completion_chunk_response_to_lmi_schema = function_not_here(
    "convert_completion_chunk_response_to_lmi_schema", TENSORRT_LLM
)
lmi_with_details_non_stream_output_formatter = function_not_here(
    "lmi_with_details_non_stream_output_formatter", TENSORRT_LLM
)
lmi_non_stream_output_formatter = function_not_here("lmi_non_stream_output_formatter", TENSORRT_LLM)
lmi_with_details_stream_output_formatter = function_not_here("lmi_with_details_stream_output_formatter", TENSORRT_LLM)
lmi_stream_output_formatter = function_not_here("lmi_stream_output_formatter", TENSORRT_LLM)
trtllm_non_stream_output_formatter = function_not_here("trtllm_non_stream_output_formatter", TENSORRT_LLM)
trtllm_stream_output_formatter = function_not_here("trtllm_stream_output_formatter", TENSORRT_LLM)
