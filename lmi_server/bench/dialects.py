"""How a prompt is sent and an answer is read in each API that servers of language models have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from lmi_server.bench.workload import Prompt

Usage = Mapping[str, int]
"""Tokens by name: prompt_tokens, completion_tokens, cached_tokens."""

# To look for what events with tokens have costs a tenth of parsing them, and the load generator needs its time. Events
# without text, such as the one with the role, do not count.
_CONTENT = re.compile(rb'"(?:reasoning_)?content":\s*"(?!")')
_TEXT = re.compile(rb'"text":\s*"(?!")')
_TOKEN = re.compile(rb'"token":\s*\{')
_DATA = b"data:"
_DONE = b"[DONE]"


class Dialect(Protocol):
    """One API: its path, the body of a request, and what an answer says."""

    path: str

    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        """Return the JSON body of a request."""

    def count(self, lines: bytes) -> int:
        """Return how many events with tokens these whole lines of a stream have."""

    def usage(self, answer: bytes, stream: bool) -> Usage:
        """Return what a complete answer says about tokens. Raises ValueError if it is an error, or cannot be read."""

    def text(self, answer: bytes, stream: bool) -> str:
        """Return the text of a complete answer that `usage` could read."""


class _OpenAi:
    def __init__(self, path: str, pattern: re.Pattern[bytes]) -> None:
        self.path = path
        self._pattern = pattern

    def count(self, lines: bytes) -> int:
        return len(self._pattern.findall(lines))

    def usage(self, answer: bytes, stream: bool) -> Usage:
        usage: Mapping[str, Any] = {}
        for value in _last_events(answer) if stream else [json.loads(answer)]:
            _refuse_error(value)
            usage = value.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
        counts["cached_tokens"] = details.get("cached_tokens")
        return {name: int(count) for name, count in counts.items() if count is not None}

    def _body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"model": prompt.adapter or model, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if prompt.output_tokens is not None:
            body["max_tokens"] = prompt.output_tokens
        if prompt.exact:
            body["ignore_eos"] = True
        return body


class _Chat(_OpenAi):
    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        return {"messages": prompt.chat, **self._body(prompt, model, stream)}

    def text(self, answer: bytes, stream: bool) -> str:
        key = "delta" if stream else "message"
        return "".join(choice[key].get("content") or "" for choice in _choices(answer, stream))


class _Completions(_OpenAi):
    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        return {"prompt": _text(prompt), **self._body(prompt, model, stream)}

    def text(self, answer: bytes, stream: bool) -> str:
        return "".join(choice["text"] for choice in _choices(answer, stream))


class _Lmi:
    """LMI's own schema; a stream is JSON lines, one per token."""

    path = "/invocations"

    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        adapter = {} if prompt.adapter is None else {"adapters": prompt.adapter}
        parameters = _lmi_parameters(prompt, details=not stream)
        return {"inputs": _text(prompt), "parameters": parameters, "stream": stream, **adapter}

    def count(self, lines: bytes) -> int:
        return len(_TOKEN.findall(lines))

    def usage(self, answer: bytes, stream: bool) -> Usage:
        if stream:
            lines = self._events(answer)
            if lines:
                _refuse_error(lines[-1])
            return {"completion_tokens": sum("token" in line for line in lines)}
        details = json.loads(answer).get("details") or {}
        return {} if "generated_tokens" not in details else {"completion_tokens": int(details["generated_tokens"])}

    def text(self, answer: bytes, stream: bool) -> str:
        if not stream:
            return str(json.loads(answer)["generated_text"])
        return "".join(event["token"]["text"] for event in self._events(answer) if "token" in event)

    def _events(self, answer: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in answer.splitlines() if line]


class _Tgi(_Lmi):
    def __init__(self, path: str) -> None:
        self.path = path

    def body(self, prompt: Prompt, model: str, stream: bool) -> dict[str, Any]:
        adapter = {} if prompt.adapter is None else {"adapter_id": prompt.adapter}
        return {"inputs": _text(prompt), "parameters": {**_lmi_parameters(prompt, details=True), **adapter}}

    def usage(self, answer: bytes, stream: bool) -> Usage:
        last = _last_events(answer)[-1] if stream else json.loads(answer)
        _refuse_error(last)
        return {"completion_tokens": int(last["details"]["generated_tokens"])}

    def _events(self, answer: bytes) -> list[dict[str, Any]]:
        return [json.loads(event) for event in _events(answer)]


_STREAMED: Mapping[str, Dialect] = {
    "chat": _Chat("/v1/chat/completions", _CONTENT),
    "completions": _Completions("/v1/completions", _TEXT),
    "lmi": _Lmi(),
    "tgi": _Tgi("/generate_stream"),
}
_WHOLE: Mapping[str, Dialect] = {**_STREAMED, "tgi": _Tgi("/generate")}
NAMES = tuple(_STREAMED)


def dialect_of(name: str, stream: bool) -> Dialect:
    """Return the API of this name; one of NAMES."""
    return (_STREAMED if stream else _WHOLE)[name]


def _text(prompt: Prompt) -> str:
    return prompt.text or "\n".join(str(message.get("content", "")) for message in prompt.messages)


def _lmi_parameters(prompt: Prompt, details: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {"details": True} if details else {}
    if prompt.output_tokens is not None:
        parameters["max_new_tokens"] = prompt.output_tokens
    if prompt.exact:
        parameters["ignore_eos_token"] = True
    return parameters


def _refuse_error(event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))


def _choices(answer: bytes, stream: bool) -> list[dict[str, Any]]:
    """Return the choices of all events, or of the one answer."""
    values = [json.loads(event) for event in _events(answer)] if stream else [json.loads(answer)]
    return [choice for value in values for choice in value.get("choices") or ()]


def _last_events(answer: bytes) -> list[dict[str, Any]]:
    """Return the last two server-sent events, which have errors and counts; the others are tokens alone."""
    events = _events(answer)
    if not events:
        raise ValueError("the stream has no events")
    return [json.loads(event) for event in events[-2:]]


def _events(answer: bytes) -> list[bytes]:
    """Return the JSON of all server-sent events."""
    lines = [line[len(_DATA) :].strip() for line in answer.splitlines() if line.startswith(_DATA)]
    return [line for line in lines if line != _DONE]
