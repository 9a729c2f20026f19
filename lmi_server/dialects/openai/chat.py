"""Parses OpenAI's chat completions, and chooses the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.errors import is_openai
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import SSE, Framing
from lmi_server.dialects.lmi.formatters import CHAT_FRAMINGS, choose_framing
from lmi_server.dialects.openai import messages as chats
from lmi_server.dialects.openai.answer import ParsedOpenAI
from lmi_server.dialects.openai.chat_answer import ChatBody, ChatStream
from lmi_server.dialects.openai.request import (
    SHARED_FIELDS,
    UNSUPPORTED,
    answer_options,
    read,
)
from lmi_server.dialects.parameters.choices import choices_of


def _no_function(name: str, value: Any) -> None:
    if value not in ("none", "auto"):
        raise RequestError(f"{name} is not supported; send tool_choice")


def _only_text(name: str, value: Any) -> None:
    if value != ["text"]:
        raise fields.not_allowed(name, value, 'send ["text"] or leave it out')


CHAT_FIELDS: dict[str, Field] = {
    **SHARED_FIELDS,
    **chats.TEMPLATE_FIELDS,
    "max_completion_tokens": Field("max_completion_tokens", fields.MAX_TOKENS),
    "logprobs": Field("with_logprobs", fields.boolean),
    "top_logprobs": Field("top_logprobs", fields.LOGPROBS),
    "tools": Field("tools", chats.tools, "tools"),
    "tool_choice": Field("tool_choice", chats.tool_choice),
    "parallel_tool_calls": Field("parallel_tool_calls", fields.boolean),
    "functions": Field(None, fields.off("send tools")),
    "function_call": Field(None, _no_function),
    "documents": Field("documents", fields.objects),
    "reasoning_effort": Field("reasoning_effort", fields.string),
    "include_reasoning": Field("include_reasoning", fields.boolean),
    "thinking_token_budget": Field("thinking_token_budget", fields.integer(-1, 2**31 - 1), "reasoning"),
    "best_of": Field(None, fields.one("send n instead: the answer has every choice that is generated")),
    "modalities": Field(None, _only_text),
    **{
        name: Field(None, UNSUPPORTED)
        for name in ("audio", "web_search_options", "echo", "mm_processor_kwargs", "media_io_kwargs")
    },
}


def parse_chat(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/chat/completions. Raises RequestError."""
    asked = read(request, body, CHAT_FIELDS, served, "chatcmpl")
    values = asked.values
    if "messages" not in values:
        raise RequestError('messages is missing; send a list such as [{"role": "user", "content": "Hello"}]')
    messages = chats.for_model(values["messages"], served)
    framing, formatter_warning = _chat_framing(request, served, asked.stream)
    options = answer_options(values, _alternatives(values))
    # max_tokens is the older name.
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    generation = chats.chat_request(
        request,
        msgspec.structs.replace(asked, stream=framing is not None),
        messages,
        served,
        max_tokens,
        logprobs=options.alternatives,
    )
    requests = choices_of(generation, options.n)
    parsed = ParsedOpenAI(requests, asked.envelope, asked.warnings + formatter_warning, options)
    return ChatBody(parsed) if framing is None else ChatStream(parsed, framing)


def _chat_framing(request: Input, served: ServedModel, stream: bool) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of a streamed answer, or None for one JSON object; and the warnings.

    option.output_formatter is LMI's, so that it has no effect on OpenAI's own routes.
    """
    if is_openai(request.route):
        return (SSE if stream else None), ()
    return choose_framing(request, served, stream, CHAT_FRAMINGS)


def _alternatives(values: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives that chat's `logprobs` and `top_logprobs` ask for."""
    top: int | None = values.get("top_logprobs")
    if values.get("with_logprobs", False):
        return top or 0
    if top:
        raise fields.not_allowed("top_logprobs", top, "send logprobs: true with it")
    return None
