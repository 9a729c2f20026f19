"""Parses Anthropic's messages, and requests for the number of their tokens.

Anthropic's documentation of its Messages API names the fields. All but their form
is as in a chat completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, NamedTool, StructuredOutputs
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.anthropic.answer import MessageBody, MessageStream
from lmi_server.dialects.anthropic.turns import conversation, system_text
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.openai import messages as chats
from lmi_server.dialects.openai.request import SHARED_FIELDS, Envelope, read
from lmi_server.dialects.parameters import constraints

_SHARED = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "priority",
    "adapter",
    "adapters",
    # Not of the API; clients send them as extra fields.
    "seed",
    "logit_bias",
    "structured_outputs",
)
# Accepted without a warning: they do not change what this server answers, and SDKs send them unasked.
_IGNORED = (
    "cache_control",
    "service_tier",
    "inference_geo",
    "speed",
    "diagnostics",
    "context_management",
    "anthropic_version",
    "anthropic_beta",
    "betas",
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _ToolChoice(NamedTuple):
    choice: str | NamedTool
    parallel: bool


class _Thinking(NamedTuple):
    budget: int | None
    enabled: bool
    shown: bool


class _OutputConfig(NamedTuple):
    effort: str | None
    format: StructuredOutputs | None


# --- fields ---


def _messages(name: str, value: Any) -> Any:
    """Return the messages as they are: how they are read depends on the model."""
    return value


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    return chats.tools(
        name, [_tool(f"{name}[{index}]", tool) for index, tool in enumerate(fields.objects(name, value))]
    )


def _tool(name: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise fields.not_allowed(f"{name}.type", kind, "send custom: this server runs no tools of its own")
    function: dict[str, Any] = {"name": fields.string(f"{name}.name", tool.get("name"))}
    function["parameters"] = fields.mapping(f"{name}.input_schema", tool.get("input_schema"))
    if tool.get("description") is not None:
        function["description"] = fields.string(f"{name}.description", tool["description"])
    if tool.get("strict") is not None:
        function["strict"] = fields.boolean(f"{name}.strict", tool["strict"])
    return {"type": "function", "function": function}


def _tool_choice(name: str, value: Any) -> _ToolChoice:
    kind = fields.mapping(name, value).get("type")
    parallel = not fields.boolean(f"{name}.disable_parallel_tool_use", value.get("disable_parallel_tool_use") or False)
    if kind == "tool":
        return _ToolChoice(NamedTool(fields.string(f"{name}.name", value.get("name"))), parallel)
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise fields.not_allowed(f"{name}.type", kind, f"send one of {', '.join(_CHOICES)}, tool")
    return _ToolChoice(_CHOICES[kind], parallel)


def _thinking(name: str, value: Any) -> _Thinking:
    kind = fields.mapping(name, value).get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise fields.not_allowed(f"{name}.type", kind, "send enabled, adaptive or disabled")
    budget = _BUDGET(f"{name}.budget_tokens", value.get("budget_tokens")) if kind == "enabled" else None
    return _Thinking(budget, kind != "disabled", value.get("display") != "omitted")


_BUDGET = fields.integer(1, 2**31 - 1)


def _json_format(name: str, value: Any) -> StructuredOutputs | None:
    described = fields.mapping(name, value)
    if described.get("type") == "json_schema":
        described = {"type": "json_schema", "json_schema": described}
    return constraints.response_format(name, described)


def _output_config(name: str, value: Any) -> _OutputConfig:
    config = fields.mapping(name, value)
    effort, form = config.get("effort"), config.get("format")
    return _OutputConfig(
        None if effort is None else fields.string(f"{name}.effort", effort),
        None if form is None else _json_format(f"{name}.format", form),
    )


MESSAGE_FIELDS: dict[str, Field] = {
    **{name: SHARED_FIELDS[name] for name in _SHARED},
    "messages": Field("messages", _messages),
    "system": Field("system", system_text),
    "stop_sequences": Field("stop", fields.strings),
    "tools": Field("tools", _tools, "tools"),
    "tool_choice": Field("tool_choice", _tool_choice),
    "thinking": Field("thinking", _thinking),
    "output_config": Field("output_config", _output_config),
    "output_format": Field("response_format", _json_format, "structured_outputs"),
    "metadata": Field(None, fields.mapping),
    "chat_template_kwargs": Field("chat_template_kwargs", chats.template_arguments),
    "container": Field(None, fields.off("leave it out: this server runs no tools of its own")),
    "mcp_servers": Field(None, fields.off("leave it out: this server runs no tools of its own")),
    **{name: Field(None, fields.ignored) for name in _IGNORED},
}


# --- requests ---


def parse_message(request: Input, served: ServedModel) -> Exchange:
    """Parse a body of /v1/messages. Raises RequestError."""
    asked = _parse(request, fields.json_object(request), served)
    if asked.generation.sampling.max_new_tokens is None:
        raise RequestError("max_tokens is missing; send how many tokens the answer may have")
    kind = MessageStream if asked.generation.stream else MessageBody
    return kind(asked.generation, asked.envelope, asked.warnings, request.request_id)


def parse_count(request: Input, served: ServedModel) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Return the prompt as a request to tokenize (nothing is generated from it), and warnings. Raises RequestError."""
    asked = _parse(request, fields.json_object(request), served)
    return asked.generation, asked.warnings


class _Parsed(NamedTuple):
    generation: GenerationRequest
    envelope: Envelope
    warnings: tuple[str, ...]


def _parse(request: Input, body: dict[str, Any], served: ServedModel) -> _Parsed:
    asked = read(request, body, MESSAGE_FIELDS, served, "msg")
    if "messages" not in asked.values:
        raise RequestError('messages is missing; send a list such as [{"role": "user", "content": "Hello"}]')
    system = asked.values.get("system", "")
    turns = conversation("messages", asked.values["messages"], system, "media" in served.features)
    values, warnings = _as_chat(asked.values, turns.ends_with_answer, served)
    generation = chats.chat_request(
        request, msgspec.structs.replace(asked, values=values), turns.messages(), served, values.get("max_tokens")
    )
    return _Parsed(generation, asked.envelope, asked.warnings + warnings)


def _as_chat(
    values: Mapping[str, Any], continues: bool, served: ServedModel
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the values as a chat completion has them, and a warning if the handler cannot limit the thinking."""
    thinking: _Thinking | None = values.get("thinking")
    config: _OutputConfig = values.get("output_config", _OutputConfig(None, None))
    chosen: _ToolChoice | None = values.get("tool_choice")
    translated: dict[str, Any] = {"continue_final_message": True} if continues else {}
    warnings: tuple[str, ...] = ()
    if config.effort is not None:
        translated["reasoning_effort"] = config.effort
    if thinking is not None:
        if not thinking.enabled:
            translated["reasoning_effort"] = "none"
        translated["include_reasoning"] = thinking.shown
        if "reasoning" in served.features:
            translated["thinking_token_budget"] = thinking.budget
        elif thinking.budget is not None:
            warnings = ("thinking.budget_tokens is ignored: the handler does not limit the model's thinking",)
    if config.format is not None:
        if "structured_outputs" not in served.features:
            raise fields.unsupported_error("output_config.format")
        translated["response_format"] = config.format
    if chosen is not None:
        names = [tool["function"]["name"] for tool in values.get("tools", ())]
        if isinstance(chosen.choice, NamedTool) and chosen.choice.name not in names:
            raise fields.not_allowed("tool_choice.name", chosen.choice.name, "send the name of one of tools")
        translated |= {"tool_choice": chosen.choice, "parallel_tool_calls": chosen.parallel}
    return {**values, **translated}, warnings
