"""The names of LMI's asynchronous service of TensorRT-LLM. They refuse: this server has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from djl_python.not_here import TENSORRT_LLM, ServiceNotHere, function_not_here


class ConversationMessage(TypedDict):
    """A message of a chat with one text."""

    role: str
    content: str


def parse_chat_message_content(message: Mapping[str, Any]) -> list[ConversationMessage]:
    """Return a message with the texts of its parts as lines; nothing for one without content.

    Raises NotImplementedError for a part that is no text.
    """
    content = message.get("content")
    if content is None:
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    other = [part["type"] for part in parts if part["type"] != "text"]
    if other:
        raise NotImplementedError(f"a part of the type {other[0]} is not supported; send texts")
    return [ConversationMessage(role=message["role"], content="\n".join(part["text"] for part in parts))]


class TensorRTLlmAsyncService(ServiceNotHere):
    instead = TENSORRT_LLM


service = TensorRTLlmAsyncService()

handle = function_not_here("handle", TENSORRT_LLM)
