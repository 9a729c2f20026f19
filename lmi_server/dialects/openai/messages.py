"""Reads the messages and the tools of a chat, and how its template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import ChatOptions, GenerationRequest, NamedTool
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.fields import Field
from lmi_server.dialects.openai.request import RequestFields, generation_request, sampling_parameters

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Arguments of the renderer that this server sets itself; a client that could replace them would choose the template.
_RESERVED_ARGUMENTS = ("chat_template", "tokenize", "messages", "conversation")
_MAX_ARGUMENTS = 100


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Read the messages; each content is a text or a list of parts. Raises RequestError."""
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, 'send a list such as [{"role": "user", "content": "Hello"}]')
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"role": "user", "content": "Hello"}')
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.not_allowed(f"{name}.role", role, f"send one of {', '.join(sorted(_ROLES))}")
    if isinstance(content, str):
        return value
    if content is None and role == "assistant":  # a turn that called tools and said nothing
        return {**value, "content": ""}
    if not isinstance(content, list):
        raise fields.not_allowed(f"{name}.content", content, "send a string or a list of text parts")
    for index, part in enumerate(content):
        _check_part(f"{name}.content[{index}]", part)
    return value


def _check_part(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise fields.not_allowed(name, value, 'send an object such as {"type": "text", "text": "Hello"}')
    if fields.string(f"{name}.type", value.get("type")) == "text":
        fields.string(f"{name}.text", value.get("text"))


def for_model(checked: list[dict[str, Any]], served: ServedModel) -> list[dict[str, Any]]:
    """Return the messages as the model's handler takes them. Raises RequestError if it takes text and a part is not."""
    return checked if "media" in served.features else _as_text(checked)


def _as_text(checked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with strings as contents: the chat templates of text models expect them.

    Parts are joined by line ends, as with LMI. Raises RequestError if a part is not text.
    """
    return [
        {**message, "content": _text_of(f"messages[{index}].content", message["content"])}
        if isinstance(message["content"], list)
        else message
        for index, message in enumerate(checked)
    ]


def _text_of(name: str, parts: Sequence[dict[str, Any]]) -> str:
    for index, part in enumerate(parts):
        if part["type"] != "text":
            raise fields.not_allowed(f"{name}[{index}].type", part["type"], 'send "text": the model takes text only')
    return "\n".join([part["text"] for part in parts])


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Read the functions that the model may call. Raises RequestError."""
    checked = fields.objects(name, value)
    for index, tool in enumerate(checked):
        where = f"{name}[{index}]"
        if tool.get("type", "function") != "function":
            raise fields.not_allowed(f"{where}.type", tool["type"], "send function, the only kind of tool")
        function = fields.mapping(f"{where}.function", tool.get("function"))
        _function_name(f"{where}.function.name", function.get("name"))
        if function.get("parameters") is not None:
            fields.mapping(f"{where}.function.parameters", function["parameters"])
    return checked


def _function_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise fields.not_allowed(name, value, "send the name of the function")
    return value


def tool_choice(name: str, value: Any) -> str | NamedTool:
    """Read which tool the model must call, or whether it may. Raises RequestError."""
    if value in ("none", "auto", "required"):
        return str(value)
    if not isinstance(value, dict):
        raise fields.not_allowed(
            name, value, 'send none, auto, required or {"type": "function", "function": {"name": "..."}}'
        )
    if value.get("type") != "function":
        raise fields.not_allowed(f"{name}.type", value.get("type"), "send function")
    function = fields.mapping(f"{name}.function", value.get("function"))
    return NamedTool(_function_name(f"{name}.function.name", function.get("name")))


def template_arguments(name: str, value: Any) -> dict[str, Any]:
    """Read the arguments that the chat template gets beside messages and tools. Raises RequestError."""
    arguments = fields.mapping(name, value)
    if len(arguments) > _MAX_ARGUMENTS:
        raise RequestError(f"{name}: {len(arguments)} arguments are not allowed; send at most {_MAX_ARGUMENTS}")
    for key in _RESERVED_ARGUMENTS:
        if key in arguments:
            raise RequestError(f"{name}.{key} is not supported; leave it out")
    return arguments


TEMPLATE_FIELDS: dict[str, Field] = {
    "messages": Field("messages", messages),
    "add_generation_prompt": Field("add_generation_prompt", fields.boolean),
    "continue_final_message": Field("continue_final_message", fields.boolean),
    "add_special_tokens": Field("add_special_tokens", fields.boolean),
    "chat_template_kwargs": Field("chat_template_kwargs", template_arguments),
    "chat_template": Field(None, fields.off("leave it out: the tokenizer's chat template is used")),
}
"""The fields that describe a prompt, of chats and of requests to tokenize one."""


def chat_options(values: Mapping[str, Any]) -> ChatOptions:
    """Return how to render the chat and read its answer. Raises RequestError if two fields contradict each other."""
    offered = values.get("tools") or ()
    # OpenAI's defaults: with tools the model may call one, without tools there is nothing to call.
    choice = values.get("tool_choice", "auto" if offered else "none")
    if not offered and choice != "auto" and choice != "none":
        raise RequestError("tool_choice is only allowed with tools; send tools, or leave it out")
    if isinstance(choice, NamedTool) and choice.name not in [tool["function"]["name"] for tool in offered]:
        raise fields.not_allowed("tool_choice.function.name", choice.name, "send the name of one of tools")
    continued = values.get("continue_final_message", False)
    opened = values.get("add_generation_prompt", not continued)
    if continued and opened:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other; send one of them")
    return ChatOptions(
        tool_choice=choice if offered else "none",
        add_generation_prompt=opened,
        continue_final_message=continued,
        **{name: values[name] for name in _PLAIN_OPTIONS if name in values},
    )


_PLAIN_OPTIONS = (
    "parallel_tool_calls",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "include_reasoning",
    "thinking_token_budget",
)


def chat_request(
    request: Input,
    asked: RequestFields,
    messages: list[dict[str, Any]],
    served: ServedModel,
    max_tokens: int | None,
    **scores: int | None,
) -> GenerationRequest:
    """Return the request of one answer to a chat; `scores` go to `sampling_parameters`. Raises RequestError."""
    values = asked.values
    chat = chat_options(values)
    return generation_request(
        request,
        asked,
        sampling_parameters(values, served, max_tokens, **scores),
        prompt=None,
        messages=messages,
        tools=values.get("tools"),
        chat=chat,
        add_special_tokens=values.get("add_special_tokens", False),
    )
