"""The names of LMI's parser of chats for vLLM. The server's own handler takes its place, so they refuse to run."""

from __future__ import annotations

from typing import TypeAlias

from djl_python.not_here import VLLM, function_not_here

RequestPrompt: TypeAlias = str | list[int]
"""A prompt as text or as token ids."""

parse_chat_completions_request_vllm = function_not_here("parse_chat_completions_request_vllm", VLLM)
tokenize_prompt_input = function_not_here("tokenize_prompt_input", VLLM)
normalize_prompt_text_to_input = function_not_here("normalize_prompt_text_to_input", VLLM)
normalize_prompt_tokens_to_input = function_not_here("normalize_prompt_tokens_to_input", VLLM)
validate_input = function_not_here("validate_input", VLLM)
