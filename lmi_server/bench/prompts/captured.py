"""Prompts of requests that a server has captured, in the lines of SageMaker's data capture."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from lmi_server.bench.workload import Prompt

logger = logging.getLogger(__name__)

MARK = '"captureData"'
"""What every line of such a file has."""

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")


def captured_prompts(lines: Iterable[str]) -> list[Prompt]:
    """Return the prompts that the lines have, in the order of their times; the first one is at second 0.

    A request that is no prompt is left out, with a warning: embeddings, bytes, a body that was cut off or withheld, and
    one that continues a stored response, whose beginning it does not have.
    """
    found: list[tuple[float, Prompt]] = []
    left_out = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            found.append(_of_line(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            left_out += 1
    if left_out:
        logger.warning("%d of %d captured requests are no prompts, and are left out", left_out, left_out + len(found))
    found.sort(key=lambda each: each[0])
    begin = found[0][0] if found else 0.0
    return [_at(prompt, time - begin) for time, prompt in found]


def _at(prompt: Prompt, second: float) -> Prompt:
    return Prompt(prompt.text, prompt.messages, prompt.output_tokens, adapter=prompt.adapter, at=second)


def _of_line(line: Mapping[str, Any]) -> tuple[float, Prompt]:
    """Return the time and the prompt of a line. Raises what a line of another form raises, such as KeyError."""
    time = datetime.fromisoformat(line["eventMetadata"]["inferenceTime"]).timestamp()
    given = line["captureData"]["endpointInput"]
    data = given["data"]
    body = json.loads(base64.b64decode(data, validate=True) if given.get("encoding") == "BASE64" else data)
    if "path=/v1/responses" in (line["eventMetadata"].get("customAttributes") or ()):
        body = _as_chat(body)
    return time, _of_body(body)


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request of OpenAI's Responses as one of its chats. Its items that are no messages are left out."""
    if body.get("previous_response_id") is not None:
        raise ValueError("the conversation before it is not there")
    given = body["input"]
    said = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": each["role"], "content": _text(each["content"])} for each in said if "role" in each]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    return {**body, "messages": messages}


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _of_body(body: Mapping[str, Any]) -> Prompt:
    parameters = {**body, **(body.get("parameters") or {})}
    tokens = next((int(parameters[name]) for name in _LENGTHS if parameters.get(name) is not None), None)
    messages, text, adapter = body.get("messages"), body.get("prompt", body.get("inputs")), body.get("adapters")
    if isinstance(messages, list) and messages:
        return Prompt("", tuple(dict(message) for message in messages), tokens)
    if not isinstance(text, str) or not text:
        raise ValueError("the body has neither messages nor the text of a prompt")
    return Prompt(text, output_tokens=tokens, adapter=adapter if isinstance(adapter, str) else None)
