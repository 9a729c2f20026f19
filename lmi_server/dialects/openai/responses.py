"""Parses OpenAI's responses: a chat in another form.

Every request must bring its whole conversation. A server that stores responses puts it into the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import NamedTool, StructuredOutputs
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.openai import messages as chats
from lmi_server.dialects.openai.request import SHARED_FIELDS, read
from lmi_server.dialects.openai.responses_answer import RequestEcho, ResponseBody, ResponseStream
from lmi_server.dialects.parameters import constraints

_STORED = fields.off("send the whole conversation as input; with responses_store previous_response_id continues one")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "structured_outputs",
    "request_id",
    "priority",
    "model",
    "stream",
    "adapter",
    "adapters",
)
_IGNORED = (
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
    "max_tool_calls",
)


# --- fields ---


def _conversation(name: str, value: Any) -> list[dict[str, Any]]:
    """Read the input: a text, or a list of messages, function calls, their outputs, and reasoning."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, "send a string, or a list of messages")
    found: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _add_item(found, f"{name}[{index}]", item)
    return chats.messages(name, found)


def _add_item(found: list[dict[str, Any]], name: str, item: Any) -> None:
    kind = fields.mapping(name, item).get("type", "message")
    if kind == "message":
        found.append({"role": item.get("role"), "content": _content(f"{name}.content", item.get("content"))})
    elif kind == "function_call":
        _turn_of_assistant(found).setdefault("tool_calls", []).append(_call(name, item))
    elif kind == "function_call_output":
        call = fields.string(f"{name}.call_id", item.get("call_id"))
        content = _content(f"{name}.output", item.get("output"))
        found.append({"role": "tool", "tool_call_id": call, "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        _turn_of_assistant(found)["reasoning"] = "".join(
            fields.string(f"{name}.content.text", fields.mapping(f"{name}.content", part).get("text"))
            for part in fields.objects(f"{name}.content", parts)
        )
    else:
        raise fields.not_allowed(f"{name}.type", kind, "send message, function_call, function_call_output or reasoning")


def _turn_of_assistant(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's turn to which reasoning and calls belong; items of one turn follow each other."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _call(name: str, item: dict[str, Any]) -> dict[str, Any]:
    texts = {key: fields.string(f"{name}.{key}", item.get(key)) for key in ("call_id", "name", "arguments")}
    function = {"name": texts["name"], "arguments": texts["arguments"]}
    return {"id": texts["call_id"], "type": "function", "function": function}


def _content(name: str, value: Any) -> Any:
    """Return the content in the form that chat completions have."""
    if not isinstance(value, list):
        return value
    return [_part(f"{name}[{index}]", part) for index, part in enumerate(value)]


def _part(name: str, value: Any) -> dict[str, Any]:
    kind = fields.mapping(name, value).get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": fields.string(f"{name}.text", value.get("text"))}
    if kind == "refusal":
        return {"type": "text", "text": fields.string(f"{name}.refusal", value.get("refusal"))}
    if kind == "input_image" and value.get("image_url") is not None:
        url = {"url": fields.string(f"{name}.image_url", value["image_url"])}
        return {"type": "image_url", "image_url": url}
    raise fields.not_allowed(f"{name}.type", kind, "send input_text, output_text, or input_image with image_url")


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Read the functions, which lack the wrapper of chat completions."""
    for index, tool in enumerate(fields.objects(name, value)):
        if tool.get("type") != "function":
            raise fields.not_allowed(f"{name}[{index}].type", tool.get("type"), "send function, the only kind of tool")
    keys = ("name", "description", "parameters", "strict")
    wrapped = [
        {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
        for tool in value
    ]
    return chats.tools(name, wrapped)


def _tool_choice(name: str, value: Any) -> str | NamedTool:
    if isinstance(value, dict) and "function" not in value:
        return chats.tool_choice(name, {"type": value.get("type"), "function": {"name": value.get("name")}})
    return chats.tool_choice(name, value)


def _text(name: str, value: Any) -> StructuredOutputs | None:
    described = fields.mapping(name, value).get("format")
    if described is None:
        return None
    if fields.mapping(f"{name}.format", described).get("type") == "json_schema":
        described = {"type": "json_schema", "json_schema": described}
    return constraints.response_format(f"{name}.format", described)


def _reasoning(name: str, value: Any) -> str | None:
    effort = fields.mapping(name, value).get("effort")
    return None if effort is None else fields.string(f"{name}.effort", effort)


RESPONSE_FIELDS: dict[str, Field] = {
    **{name: SHARED_FIELDS[name] for name in _SAMPLING},
    "input": Field("messages", _conversation),
    "instructions": Field("instructions", fields.string),
    "max_output_tokens": Field("max_output_tokens", fields.MAX_TOKENS),
    "top_logprobs": Field("top_logprobs", fields.LOGPROBS),
    "include": Field("include", fields.strings),
    "tools": Field("tools", _tools, "tools"),
    "tool_choice": Field("tool_choice", _tool_choice),
    "parallel_tool_calls": Field("parallel_tool_calls", fields.boolean),
    "text": Field("response_format", _text, "structured_outputs"),
    "reasoning": Field("reasoning_effort", _reasoning),
    "chat_template_kwargs": Field("chat_template_kwargs", chats.template_arguments),
    "metadata": Field("metadata", fields.mapping),
    "truncation": Field("truncation", fields.string),
    "previous_response_id": Field(None, _STORED),
    "conversation": Field(None, _STORED),
    "background": Field(None, fields.off("leave it out; it needs the setting responses_store")),
    "prompt": Field(None, fields.off("send input: prompts are not stored")),
    **{name: Field(None, fields.ignored) for name in _IGNORED},
}
_LOGPROBS = "message.output_text.logprobs"
_ECHOED = ("tools", "tool_choice", "metadata", "text", "reasoning")  # the answer repeats them as the client sent them


def parse_response(request: Input, body: dict[str, Any], served: ServedModel) -> Exchange:
    """Parse a body of /v1/responses. Raises RequestError."""
    asked = read(request, body, RESPONSE_FIELDS, served, "resp")
    values = asked.values
    messages = _messages(values, served)
    _check_truncation(values.get("truncation", "disabled"))
    alternatives, max_tokens = _alternatives(values), values.get("max_output_tokens")
    generation = chats.chat_request(request, asked, messages, served, max_tokens, logprobs=alternatives)
    repeated = {name: body[name] for name in _ECHOED if body.get(name)}
    echo = RequestEcho(repeated, values.get("instructions"), max_tokens, alternatives)
    return (ResponseStream if asked.stream else ResponseBody)(generation, asked.envelope, asked.warnings, echo)


def _messages(values: Mapping[str, Any], served: ServedModel) -> list[dict[str, Any]]:
    if "messages" not in values:
        raise RequestError("input is missing; send a string, or a list of messages")
    messages: list[dict[str, Any]] = values["messages"]
    if "instructions" in values:
        messages = [{"role": "system", "content": values["instructions"]}, *messages]
    return chats.for_model(messages, served)


def _check_truncation(truncation: str) -> None:
    if truncation != "disabled":
        raise fields.not_allowed("truncation", truncation, "send disabled: a prompt that does not fit is refused")


def _alternatives(values: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives; either of `top_logprobs` and `include` asks for log probabilities."""
    top: int | None = values.get("top_logprobs")
    return top or 0 if top is not None or _LOGPROBS in values.get("include", ()) else None
