"""Turns a conversation of Anthropic's API into the messages of a chat, which handlers take in OpenAI's form.

A turn is a text or a list of blocks: text, images, calls of tools and their results. A result of a tool is a block of
the user's turn here, and a message of its own there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.dialects import fields

Part = dict[str, Any]
"""One part of a message's content: a text, or the URL of an image."""

# What Claude Code puts before its instructions; it differs from request to request, so that no prefix could be reused.
_ATTRIBUTION = "x-anthropic-billing-header"
_ROLES = ("user", "assistant", "system")


def system_text(name: str, value: Any) -> str:
    """Read the instructions: a text, or a list of text blocks. Raises RequestError."""
    if isinstance(value, str):
        return value
    texts = [_text_block(f"{name}[{index}]", block) for index, block in enumerate(fields.objects(name, value))]
    return "\n".join(text for text in texts if not text.startswith(_ATTRIBUTION))


def _text_block(name: str, block: dict[str, Any]) -> str:
    if block.get("type") != "text":
        raise fields.not_allowed(f"{name}.type", block.get("type"), "send text")
    return fields.string(f"{name}.text", block.get("text"))


class Conversation:
    """The messages of a chat, built turn by turn. Turns of the same role that follow each other become one."""

    def __init__(self, takes_images: bool) -> None:
        """`takes_images`: whether the model takes anything but text."""
        self._takes_images = takes_images
        self._messages: list[dict[str, Any]] = []

    def add_system(self, text: str) -> None:
        if text:
            self._messages.append({"role": "system", "content": text})

    def add(self, name: str, value: Any) -> None:
        """Add one element of `messages`; `name` is its name in errors. Raises RequestError."""
        turn = fields.mapping(name, value)
        role, content = turn.get("role"), turn.get("content")
        if role not in _ROLES:
            raise fields.not_allowed(f"{name}.role", role, f"send one of {', '.join(_ROLES)}")
        if role == "system":
            self.add_system(system_text(f"{name}.content", content))
            return
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise fields.not_allowed(f"{name}.content", content, "send a string, or a list of blocks")
        add = self._add_of_user if role == "user" else self._add_of_assistant
        for index, block in enumerate(content):
            where = f"{name}.content[{index}]"
            add(where, fields.mapping(where, block))

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat."""
        return [{**message, "content": _join_texts(message["content"])} for message in self._messages]

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last turn is the beginning of an answer, which the model continues."""
        last = self._messages[-1]
        return last["role"] == "assistant" and "tool_calls" not in last and bool(_join_texts(last["content"]))

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _add_of_user(self, name: str, block: dict[str, Any]) -> None:
        if block.get("type") != "tool_result":
            self._turn("user")["content"].append(self._part(name, block))
            return
        call = fields.string(f"{name}.tool_use_id", block.get("tool_use_id"))
        parts = self._result(f"{name}.content", block.get("content"))
        self._messages.append({"role": "tool", "tool_call_id": call, "content": _texts(parts)})
        images = [part for part in parts if part["type"] != "text"]
        if images:  # a result is text alone, so they follow it as the user's
            self._turn("user")["content"] += images

    def _result(self, name: str, value: Any) -> list[Part]:
        if isinstance(value, str):
            return [_text(value)]
        blocks = [] if value is None else fields.objects(name, value)
        return [self._part(f"{name}[{index}]", block) for index, block in enumerate(blocks)]

    def _add_of_assistant(self, name: str, block: dict[str, Any]) -> None:
        turn = self._turn("assistant")
        kind = block.get("type")
        if kind == "text":
            turn["content"].append(_text(_text_block(name, block)))
        elif kind == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(name, block))
        elif kind == "thinking":
            turn["reasoning"] = turn.get("reasoning", "") + fields.string(f"{name}.thinking", block.get("thinking"))
        elif kind != "redacted_thinking":  # what only the server that sent it can read
            raise fields.not_allowed(f"{name}.type", kind, "send text, tool_use or thinking")

    def _part(self, name: str, block: dict[str, Any]) -> Part:
        """Return a block of the user's turn, or of a tool's result, as a part of a message."""
        kind = block.get("type")
        if kind == "text":
            return _text(_text_block(name, block))
        read = _SOURCES.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise fields.not_allowed(f"{name}.type", kind, "send text, image, tool_result, or a document of plain text")
        if kind == "image" and not self._takes_images:
            raise fields.not_allowed(f"{name}.type", kind, 'send "text": the model takes text only')
        return read(f"{name}.source", fields.mapping(f"{name}.source", block.get("source")))


def _image(name: str, source: dict[str, Any]) -> Part:
    kind = source.get("type")
    if kind == "url":
        url = fields.string(f"{name}.url", source.get("url"))
    elif kind == "base64":
        media_type = fields.string(f"{name}.media_type", source.get("media_type"))
        url = f"data:{media_type};base64,{fields.string(f'{name}.data', source.get('data'))}"
    else:
        raise fields.not_allowed(f"{name}.type", kind, "send base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _document(name: str, source: dict[str, Any]) -> Part:
    if source.get("type") != "text":
        raise fields.not_allowed(f"{name}.type", source.get("type"), "send text: other documents are not read here")
    return _text(fields.string(f"{name}.data", source.get("data")))


_SOURCES: dict[str, Callable[[str, dict[str, Any]], Part]] = {"image": _image, "document": _document}


def _call(name: str, block: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(fields.mapping(f"{name}.input", block.get("input"))).decode()
    function = {"name": fields.string(f"{name}.name", block.get("name")), "arguments": arguments}
    return {"id": fields.string(f"{name}.id", block.get("id")), "type": "function", "function": function}


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _texts(parts: list[Part]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _join_texts(content: str | list[Part]) -> str | list[Part]:
    """Return parts that are all text as one text: the chat templates of text models expect that."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return _texts(content)


def conversation(name: str, value: Any, system: str, takes_images: bool) -> Conversation:
    """Return the conversation of a request; `name` names the field `messages` in errors. Raises RequestError."""
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, 'send a list such as [{"role": "user", "content": "Hello"}]')
    found = Conversation(takes_images)
    found.add_system(system)
    for index, turn in enumerate(value):
        found.add(f"{name}[{index}]", turn)
    if not found.messages():
        raise RequestError(f"{name} has nothing to answer; send at least one turn of the user")
    return found
