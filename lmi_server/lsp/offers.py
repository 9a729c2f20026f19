"""What an editor shows: completions, edits and documents of keys, without the types of the protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lmi_server.configuration.declaration import Deprecated, Option, written
from lmi_server.explain.findings import Finding

LINE_END = re.compile(r"\r\n|\r|\n")
_NEAREST = re.compile(r"(?:, |; )?did you mean ([^?\n]+)\?$")
_UNKNOWN = re.compile(r"unknown key (\S+?)[,;]")
_WRONG = re.compile(r'\S+ = "([^"\n]*)" is not allowed; ')
_LONGEST = 5000  # characters of a message that is searched
_COMMENT = "; a comment needs a line of its own"
_BEHIND = re.compile(r"[ \t]([#!])")


@dataclass(frozen=True, slots=True)
class Offer:
    """One completion: `label` replaces the text of the line from `start` to the cursor, in characters."""

    label: str
    start: int
    kind: Literal["key", "value"]
    detail: str = ""
    text: str = ""
    insert: str | None = None
    deprecated: bool = False


@dataclass(frozen=True, slots=True)
class Edit:
    """A quick fix: `new` replaces the characters from `start` to `end` of line `line`, both from 0."""

    title: str
    line: int
    start: int
    end: int
    new: str


def lines_of(text: str) -> Sequence[str]:
    """Return the lines as the protocol counts them, without their ends."""
    return LINE_END.split(text)


def key_offer(option: Option, start: int) -> Offer:
    """Return the completion of a key of serving.properties."""
    default = written(option.default)
    return Offer(
        label=option.key,
        start=start,
        kind="key",
        detail=f"default: {default}" if default else "not set by default",
        text=document_of(option),
        insert=f"{option.key}=",
        deprecated=any(isinstance(mark, Deprecated) for mark in option.marks),
    )


def document_of(option: Option) -> str:
    """Return what a key means, and its allowed values."""
    return f"{option.description}\n\nAllowed: {option.allowed}."


def markdown(title: str, parts: Iterator[str]) -> str:
    """Return a text for hover. A value cannot end its code span or make a link."""
    return "\n\n".join((f"**{title}**", *parts))


def code(text: str) -> str:
    """Return a value as code of one line, cut at 200 characters."""
    plain = " ".join(text.replace("`", "'").split())
    return f"`{plain[:200]}{'...' if len(plain) > 200 else ''}`" if plain else "not set"


def fix(found: Finding, lines: Sequence[str]) -> Edit | None:
    """Return the edit that does what a finding advises; None if it advises nothing that an editor can do."""
    number = (found.line or 0) - 1
    if not 0 <= number < len(lines) or len(found.text) > _LONGEST:
        return None
    line = lines[number]
    if found.text.endswith(_COMMENT):
        return _comment_above(number, line)
    nearest = _NEAREST.search(found.text)
    if nearest is None:
        return None
    unknown, wrong = _UNKNOWN.match(found.text), _WRONG.match(found.text)
    if unknown is not None:
        # A model file has the last part of the path in the line, serving.properties the whole key.
        old, new = unknown[1], nearest[1]
        if old not in line:
            old, new = old.rpartition(".")[2], new.rpartition(".")[2]
        return _replacement(number, line.find(old), old, new)
    if wrong is not None:
        return _replacement(number, line.rfind(wrong[1]), wrong[1], nearest[1])
    return None


def _replacement(line: int, start: int, old: str, new: str) -> Edit | None:
    return None if start < 0 or not old else Edit(f"Change {old} to {new}", line, start, start + len(old), new)


def _comment_above(number: int, line: str) -> Edit | None:
    """Return the edit that puts a comment behind a value into a line above it."""
    behind = _BEHIND.search(line)
    if behind is None:
        return None
    comment = f"# {line[behind.start(1) :].lstrip('#! ')}"
    new = f"{comment}\n{line[: behind.start()].rstrip()}"
    return Edit("Put the comment into a line of its own", number, 0, len(line), new)
