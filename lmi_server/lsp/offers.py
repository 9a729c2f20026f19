"""What an editor shows: completions, edits and documents of keys, without the types of the protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lmi_server.configuration.declaration import Deprecated, Option, written

LINE_END = re.compile(r"\r\n|\r|\n")


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
