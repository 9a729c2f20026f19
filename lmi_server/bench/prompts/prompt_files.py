"""The prompts of files: JSON lines, ShareGPT's JSON, and the lines of a data capture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmi_server.bench.prompts.captured import MARK, captured_prompts
from lmi_server.bench.workload import Prompt, Turn
from lmi_server.contract.errors import ConfigurationError

_USERS = ("human", "user")  # as ShareGPT's files name them


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file: JSON lines, or ShareGPT's JSON; or those of the files `*.jsonl` of a directory.

    The lines may be those of a data capture (`captured.py`). Otherwise a line has `prompt`, `messages`, or the `turns`
    of a user. It may have `max_tokens`, `adapter`, and `at`, the second in which it is sent.
    Raises ConfigurationError if the file is neither, or has none.
    """
    try:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--data {path}: {error}") from error
    if MARK in text.lstrip().partition("\n")[0]:  # a server that could write nothing has left an empty file
        prompts = captured_prompts(text.split("\n"))  # a text may have what splitlines() takes for an end of line
    else:
        prompts = _share_gpt(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    if not prompts:
        raise ConfigurationError(f"--data {path} has no prompts")
    return prompts


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
    at = value.get("at")
    tokens = None if value.get("max_tokens") is None else int(value["max_tokens"])
    first, *later = value.get("turns") or [value.get("prompt", "")]
    return Prompt(
        str(first),
        tuple(value.get("messages") or ()),
        tokens,
        adapter=value.get("adapter"),
        at=None if at is None else float(at),
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
