"""The names of LMI's conversions between its requests and vLLM's. The server's own handler takes their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from djl_python.not_here import VLLM_FORMATS, function_not_here


@dataclass
class ProcessedRequest:
    """A request with the functions that run it and that write its answer."""

    vllm_request: Any
    inference_invoker: Callable[..., Any]
    non_stream_output_formatter: Callable[..., Any]
    stream_output_formatter: Callable[..., Any]
    accumulate_chunks: bool
    include_prompt: bool


convert_lmi_schema_to_completion_request = function_not_here("convert_lmi_schema_to_completion_request", VLLM_FORMATS)
convert_completion_logprobs_to_tgi_tokens = function_not_here("convert_completion_logprobs_to_tgi_tokens", VLLM_FORMATS)
convert_completion_prefill_to_tgi_prefill = function_not_here("convert_completion_prefill_to_tgi_prefill", VLLM_FORMATS)
convert_completion_response_to_lmi_schema = function_not_here("convert_completion_response_to_lmi_schema", VLLM_FORMATS)
vllm_non_stream_output_formatter = function_not_here("vllm_non_stream_output_formatter", VLLM_FORMATS)
vllm_stream_output_formatter = function_not_here("vllm_stream_output_formatter", VLLM_FORMATS)
convert_completion_chunk_response_to_lmi_schema = function_not_here(
    "convert_completion_chunk_response_to_lmi_schema", VLLM_FORMATS
)
lmi_with_details_non_stream_output_formatter = function_not_here(
    "lmi_with_details_non_stream_output_formatter", VLLM_FORMATS
)
lmi_non_stream_output_formatter = function_not_here("lmi_non_stream_output_formatter", VLLM_FORMATS)
lmi_with_details_stream_output_formatter = function_not_here("lmi_with_details_stream_output_formatter", VLLM_FORMATS)
lmi_stream_output_formatter = function_not_here("lmi_stream_output_formatter", VLLM_FORMATS)
embedding_output_formatter = function_not_here("embedding_output_formatter", VLLM_FORMATS)
