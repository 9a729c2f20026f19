"""Makes prompts of chat completions with the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from djl_python.chat_completions.chat_properties import ChatProperties, Message


def is_chat_completions_request(inputs: Mapping[str, Any]) -> bool:
    return "messages" in inputs


def parse_chat_completions_request(
    input_map: dict[str, Any],
    is_rolling_batch: bool,
    tokenizer: Any,
    image_token: str | None = None,
    configs: Any = None,
    is_mistral_tokenizer: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a chat completion and its parameters under LMI's names.

    Raises ValueError for a dynamic batch, AttributeError if the tokenizer has no chat template.
    """
    if not is_rolling_batch and getattr(configs, "batch_size", 1) != 1:
        raise ValueError("chat completions are not for dynamic batches; set batch_size=1 or a rolling batch")
    if not is_mistral_tokenizer and not hasattr(tokenizer, "apply_chat_template"):
        raise AttributeError(f"{type(tokenizer).__name__} has no chat templates; use a tokenizer that has one")
    chat = ChatProperties(**input_map)
    parameters = chat.model_dump(by_alias=True, exclude_none=True, exclude={"messages"})
    parameters["details"] = True  # the answer has a finish reason
    if is_mistral_tokenizer:
        return parse_mistral_chat_request_inputs(chat.messages, tokenizer), parameters
    return parse_non_mistral_chat_request_inputs(chat.messages, tokenizer, image_token or "<image>"), parameters


def parse_mistral_chat_request_inputs(messages: Sequence[Message], tokenizer: Any) -> Any:
    """Return the token ids that Mistral's own tokenizer makes of a chat."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest  # type: ignore[import-not-found]

    plain = [message.get_tokenizer_inputs() for message in messages]
    return tokenizer.mistral.encode_chat_completion(ChatCompletionRequest(messages=plain)).tokens


def parse_non_mistral_chat_request_inputs(messages: Sequence[Message], tokenizer: Any, image_token: str) -> Any:
    """Return the prompt of a chat."""
    return apply_chat_template(tokenizer, [message.get_tokenizer_inputs(image_token) for message in messages])


def apply_chat_template(tokenizer: Any, inputs: Sequence[Mapping[str, Any]]) -> Any:
    """Return messages as a prompt that ends where the answer begins."""
    return tokenizer.apply_chat_template(inputs, tokenize=False, add_generation_prompt=True)
