"""Brings the messages of a chat from OpenAI's form into the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_server.contract.errors import RequestError

_CALL_ID = "abcdefghi"  # the nine letters that Mistral's templates demand
_PROBE = {"name": "probe", "arguments": {"city": "Paris"}}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}},
    },
}


def template_messages(messages: Sequence[Mapping[str, Any]], arguments_as_text: Callable[[], bool]) -> list[Any]:
    """Return the messages for a chat template.

    Clients send the arguments of calls as the text of a JSON object. Most templates write them as JSON themselves and
    need the object; `arguments_as_text` returns whether this one needs the text. Raises RequestError.
    """
    return [
        _assistant(f"messages[{index}]", message, arguments_as_text)
        if message.get("tool_calls") or message.get("reasoning")
        else message
        for index, message in enumerate(messages)
    ]


def with_known_roles(messages: Sequence[Mapping[str, Any]], template: Any) -> Sequence[Mapping[str, Any]]:
    """Return the messages with the role `system` for `developer`, its newer name, if the template does not know that.

    As under vLLM, there is one such message then, at the beginning: many templates take no other. `template` is the
    text of one, or several by name.
    """
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    known = any(f"{quote}developer{quote}" in text for text in texts for quote in "'\"")
    if known or all(message["role"] != "developer" for message in messages):
        return messages
    instructions = [message for message in messages if message["role"] in ("developer", "system")]
    whole = {**instructions[0], "role": "system", "content": "\n\n".join(_text(one["content"]) for one in instructions)}
    return [whole, *(message for message in messages if message["role"] not in ("developer", "system"))]


def _text(content: Any) -> str:
    """Return a content as one text, as LMI joins parts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


@dataclass(frozen=True)
class ContentForms:
    """The forms of a message's content that a template renders: a text, or a list of parts.

    `image` stands for an image in a text.
    """

    text: bool
    parts: bool
    image: str

    @classmethod
    def from_template(cls, render: Callable[[list[dict[str, Any]]], str], image: str) -> ContentForms:
        """Find out the rendering of a template for images; `render` renders messages."""
        mark = "probe"
        text = _render_content(render, mark)
        parts = _render_content(render, [{"type": "text", "text": mark}])
        takes_parts = mark in parts and "'type'" not in parts
        return cls(text=mark in text or not takes_parts, parts=takes_parts, image=image)

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that the template renders."""
        return [{**message, "content": self._content(message.get("content"))} for message in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return content if self.text else [{"type": "text", "text": content}]
        if not isinstance(content, list) or self.parts:
            return content
        images = [self.image for part in content if part.get("type") != "text"]
        return "\n".join([*images, *(part["text"] for part in content if part.get("type") == "text")])


def _render_content(render: Callable[[list[dict[str, Any]]], str], content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    # The border to the template's own code, which may raise anything for a form it does not take.
    except Exception:  # noqa: BLE001
        return ""


def _assistant(name: str, message: Mapping[str, Any], arguments_as_text: Callable[[], bool]) -> dict[str, Any]:
    changed = dict(message)
    if message.get("reasoning"):  # vLLM's name of what templates read as reasoning_content
        changed.setdefault("reasoning_content", message["reasoning"])
    calls = message.get("tool_calls")
    if not calls:
        return changed
    if not isinstance(calls, list):
        raise RequestError(f"{name}.tool_calls must be a list; send the calls as the model's answer had them")
    as_text = arguments_as_text()
    changed["tool_calls"] = [_call(f"{name}.tool_calls[{at}]", call, as_text) for at, call in enumerate(calls)]
    return changed


def _call(name: str, call: Any, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f'{name} is not a call; send {{"id": ..., "type": "function", "function": {{"name": ...}}}}')
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str) and not as_text:
        arguments = _object(arguments)
    elif not isinstance(arguments, str) and as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _object(text: str) -> Any:
    """Return the JSON object that `text` is; any other text stays one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # deeper than the parser goes
        return text
    return value if isinstance(value, dict) else text


def needs_text(render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]) -> bool:
    """Return whether a template needs the arguments of calls as text: it fails with an object, or writes Python's form.

    `render` renders messages and tools.
    """
    question = {"role": "user", "content": "a"}
    try:
        with_object = render([question, _turn(_PROBE)], [_PROBE_TOOL])
    # The border to the template's own code, which may raise anything.
    except Exception:  # noqa: BLE001
        return _renders_text(render, question)
    return "{'city': 'Paris'}" in with_object


def _renders_text(render: Callable[[list[dict[str, Any]], list[dict[str, Any]]], str], question: Any) -> bool:
    try:
        render([question, _turn({**_PROBE, "arguments": json.dumps(_PROBE["arguments"])})], [_PROBE_TOOL])
    # The same border: such a template cannot render a call at all.
    except Exception:  # noqa: BLE001
        return False
    return True


def _turn(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": dict(function)}],
    }
