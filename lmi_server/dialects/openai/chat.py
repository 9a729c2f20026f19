"""Parses OpenAI's chat completions, and chooses the form of the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.choices import choices_of
from lmi_server.dialects.errors import is_openai
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import JSON_LINES, SSE, Framing
from lmi_server.dialects.lmi.formatters import formatter_warnings
from lmi_server.dialects.openai import messages as chats
from lmi_server.dialects.openai.answer import Parsed
from lmi_server.dialects.openai.chat_answer import ChatBody, ChatStream
from lmi_server.dialects.openai.request import (
    SHARED_FIELDS,
    UNSUPPORTED,
    Envelope,
    answer_options,
    envelope_of,
    generation_request,
    read,
    stream_framing,
)


def _no_function(name: str, value: Any) -> None:
    if value not in ("none", "auto"):
        raise RequestError(f"{name} is not supported; send tool_choice")


def _only_text(name: str, value: Any) -> None:
    if value != ["text"]:
        raise fields.not_allowed(name, value, 'send ["text"] or leave it out')


CHAT_FIELDS: dict[str, Field] = {
    **SHARED_FIELDS,
    "messages": Field("messages", chats.messages),
    "max_completion_tokens": Field("max_completion_tokens", fields.MAX_TOKENS),
    "logprobs": Field("logprobs", fields.boolean),
    "top_logprobs": Field("top_logprobs", fields.LOGPROBS),
    "tools": Field("tools", chats.tools, "tools"),
    "tool_choice": Field("tool_choice", chats.tool_choice),
    "parallel_tool_calls": Field("parallel_tool_calls", fields.boolean),
    "functions": Field(None, fields.off("send tools")),
    "function_call": Field(None, _no_function),
    "add_generation_prompt": Field("add_generation_prompt", fields.boolean),
    "continue_final_message": Field("continue_final_message", fields.boolean),
    "add_special_tokens": Field("add_special_tokens", fields.boolean),
    "chat_template_kwargs": Field("chat_template_kwargs", chats.template_arguments),
    "documents": Field("documents", fields.objects),
    "reasoning_effort": Field("reasoning_effort", fields.string),
    "include_reasoning": Field("include_reasoning", fields.boolean),
    "thinking_token_budget": Field("thinking_token_budget", fields.integer(-1, 2**31 - 1), "reasoning"),
    "best_of": Field(None, fields.one("send n instead: the answer has every choice that is generated")),
    "modalities": Field(None, _only_text),
    "chat_template": Field(None, fields.off("leave it out: the tokenizer's chat template is used")),
    **{
        name: Field(None, UNSUPPORTED)
        for name in ("audio", "web_search_options", "echo", "mm_processor_kwargs", "media_io_kwargs")
    },
}


def parse_chat(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/chat/completions. Raises RequestError."""
    values, warnings = read(request, body, CHAT_FIELDS, served)
    messages = values.pop("messages", None)
    if messages is None:
        raise RequestError('messages is missing; send a list such as [{"role": "user", "content": "Hello"}]')
    messages = chats.for_model(messages, served)
    envelope = envelope_of("chatcmpl", values, served)
    framing, formatter_warning = _chat_framing(request, served, values.pop("stream", False))
    _set_alternatives(values)
    options = answer_options(values)
    parsed = Parsed(
        choices_of(_generation(request, envelope, messages, values, served, framing is not None), options.n),
        envelope,
        warnings + formatter_warning,
        options,
    )
    return ChatBody(parsed) if framing is None else ChatStream(parsed, framing)


def _generation(
    request: Input,
    envelope: Envelope,
    messages: list[dict[str, Any]],
    values: dict[str, Any],
    served: ServedModel,
    stream: bool,
) -> GenerationRequest:
    chat = chats.chat_options(values)
    tools, special = values.pop("tools", None), values.pop("add_special_tokens", False)
    max_tokens = values.pop("max_tokens", None)  # the older name of max_completion_tokens
    max_tokens = values.pop("max_completion_tokens", max_tokens)
    return msgspec.structs.replace(
        generation_request(request, envelope, values, max_tokens, served),
        messages=messages,
        tools=tools,
        chat=chat,
        stream=stream,
        add_special_tokens=special,
    )


def _chat_framing(request: Input, served: ServedModel, stream: bool) -> tuple[Framing | None, tuple[str, ...]]:
    """Return the framing of a streamed answer, or None for one JSON object; and the warnings.

    option.output_formatter is LMI's, so that it has no effect on OpenAI's own routes.
    """
    by_stream = stream_framing(request, served) if stream else None
    if is_openai(request.route):
        return by_stream, ()
    match served.output_formatter:
        case "json_chat":
            return None, ()
        case "jsonlines_chat":
            return JSON_LINES, ()
        case "sse_chat":
            return SSE, ()
        case name:
            return by_stream, formatter_warnings(name)


def _set_alternatives(values: dict[str, Any]) -> None:
    """Turn chat's `logprobs` and `top_logprobs` into the number of alternatives."""
    wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if wanted:
        values["logprobs"] = top or 0
    elif top:
        raise fields.not_allowed("top_logprobs", top, "send logprobs: true with it")
