"""The prompts of files: JSON lines, ShareGPT's JSON, and the lines of a data capture."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lmi_server.bench.workload import Prompt, Turn
from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.regular_files import open_regular

logger = logging.getLogger(__name__)

MARK = '"captureData"'
"""What every line of a data capture has."""

_USERS = ("human", "user")  # as ShareGPT's files name them
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file: JSON lines, or ShareGPT's JSON; or those of the files `*.jsonl` of a directory.

    The lines may be those of a data capture. Otherwise a line has `prompt`, `messages`, or the `turns`
    of a user. It may have `max_tokens`, `adapter`, and `at`, the second in which it is sent.
    Raises ConfigurationError if the file is neither, or has none.
    """
    try:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        text = "\n".join(_read_text(file) for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--data {path}: {error}") from error
    if MARK in text.lstrip().partition("\n")[0]:  # a server that could write nothing has left an empty file
        prompts = captured_prompts(text.split("\n"))  # a text may have what splitlines() takes for an end of line
    else:
        prompts = _share_gpt(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    if not prompts:
        raise ConfigurationError(f"--data {path} has no prompts")
    return prompts


def _read_text(path: Path) -> str:
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def _lines(text: str, path: Path) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompts.append(_of_line(json.loads(line)))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ConfigurationError(
                f'--data {path}, line {number}: {error}; a line is {{"prompt": "..."}}, {{"messages": [...]}} or '
                '{"turns": ["...", ...]}'
            ) from error
    return prompts


def _of_line(value: dict[str, Any]) -> Prompt:
    if not isinstance(value, dict) or not ("prompt" in value or value.get("messages") or value.get("turns")):
        raise ValueError("it has neither prompt, messages nor turns")
    messages, turns, at = value.get("messages") or [], value.get("turns") or [], value.get("at")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is no list of objects")
    if not isinstance(turns, list):
        raise ValueError("turns is no list of texts")
    if at is not None and not math.isfinite(at := float(at)):
        raise ValueError(f"at is {at}, no second from the start")
    tokens = None if value.get("max_tokens") is None else int(value["max_tokens"])
    first, *later = turns or [value.get("prompt", "")]
    return Prompt(
        str(first),
        tuple(messages),
        tokens,
        adapter=value.get("adapter"),
        at=at,
        later=tuple(Turn(str(text), tokens) for text in later),
    )


def _share_gpt(text: str, path: Path) -> list[Prompt]:
    """Return the questions of each conversation; an answer's length in words is what may be generated for it."""
    try:
        chats = [_questions(entry["conversations"]) for entry in json.loads(text)]
        return [_chat(turns) for turns in chats if turns]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f'--data {path}: {error!r}; ShareGPT\'s form is [{{"conversations": [{{"from": ..., "value": ...}}]}}]'
        ) from error


def _questions(entries: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns of the user that have an answer; some conversations begin with the model, or the system."""
    is_users = [entry.get("from", ("human", "gpt")[number % 2]) in _USERS for number, entry in enumerate(entries)]
    return [
        Turn(str(question["value"]), max(len(str(answer["value"]).split()), 1))
        for (question, asks), (answer, asks_too) in itertools.pairwise(zip(entries, is_users, strict=True))
        if asks and not asks_too
    ]


def _chat(turns: Sequence[Turn]) -> Prompt:
    first, *later = turns
    return Prompt(first.text, output_tokens=first.output_tokens, later=tuple(later))


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
            found.append(_of_captured_line(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            left_out += 1
    if left_out:
        logger.warning("%d of %d captured requests are no prompts, and are left out", left_out, left_out + len(found))
    found.sort(key=lambda each: each[0])
    begin = found[0][0] if found else 0.0
    return [_at_second(prompt, time - begin) for time, prompt in found]


def _at_second(prompt: Prompt, second: float) -> Prompt:
    return Prompt(prompt.text, prompt.messages, prompt.output_tokens, adapter=prompt.adapter, at=second)


def _of_captured_line(line: Mapping[str, Any]) -> tuple[float, Prompt]:
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
    messages = [{"role": each["role"], "content": _text_of(each["content"])} for each in said if "role" in each]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    return {**body, "messages": messages}


def _text_of(content: str | list[dict[str, Any]]) -> str:
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
