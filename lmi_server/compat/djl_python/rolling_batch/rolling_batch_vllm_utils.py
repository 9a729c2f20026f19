"""The names of LMI's helpers around vLLM's engine. The server's own handler takes their place."""

from __future__ import annotations

from djl_python.not_here import VLLM_BATCH, function_not_here

DTYPE_MAPPER = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": "auto"}
FINISH_REASON_MAPPER = {"length": "length", "stop": "eos_token", "abort": "abort"}

update_request_cache_with_output = function_not_here("update_request_cache_with_output", VLLM_BATCH)
update_multiple_sequences = function_not_here("update_multiple_sequences", VLLM_BATCH)
get_speculative_decoding_metrics_record = function_not_here("get_speculative_decoding_metrics_record", VLLM_BATCH)
supports_speculative_decoding = function_not_here("supports_speculative_decoding", VLLM_BATCH)
create_lora_request = function_not_here("create_lora_request", VLLM_BATCH)
get_lora_request = function_not_here("get_lora_request", VLLM_BATCH)
get_multi_modal_data = function_not_here("get_multi_modal_data", VLLM_BATCH)
get_prompt_inputs = function_not_here("get_prompt_inputs", VLLM_BATCH)
maybe_serialize_tool_calls = function_not_here("maybe_serialize_tool_calls", VLLM_BATCH)
