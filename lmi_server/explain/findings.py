"""What `lmi-server check` found, each with its severity and place: for editors and annotations, which show it there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmi_server.explain.explanation import Explanation

Severity = Literal["error", "warning", "note"]

_PLACE = re.compile(r"([^\n]+?):(\d{1,9}): ")
_DATA, _PROPERTY = {"%": "%25", "\r": "%0D", "\n": "%0A"}, {":": "%3A", ",": "%2C"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `check`. `file` and `line` (from 1) are its place, and `text` is what follows it.

    An error is a wrong value or file. A note is what is right, but not served by this version or on this machine.
    """

    severity: Severity
    text: str
    file: str | None = None
    line: int | None = None

    @property
    def message(self) -> str:
        """Return the whole line."""
        return self.text if self.file is None else f"{self.file}:{self.line}: {self.text}"


def findings(explanation: Explanation) -> Iterator[Finding]:
    """Yield everything that `check` prints on a model, in its order."""
    yield from (finding("warning", line) for line in explanation.warnings)
    yield from (finding("error", line) for line in explanation.problems)
    yield from (finding("note", line) for line in explanation.unavailable)
    yield from (finding("error", line) for line in explanation.files)


def finding(severity: Severity, message: str) -> Finding:
    """Return one line of `check`, its place taken apart."""
    place = _PLACE.match(message)
    if place is None:
        return Finding(severity, message)
    return Finding(severity, message[place.end() :], place[1], int(place[2]))


def annotation(found: Finding) -> str:
    """Return the line with which a workflow of GitHub shows it beside the file; no value can begin another line."""
    kind = {"note": "notice"}.get(found.severity, found.severity)
    place = "" if found.file is None else f" file={_escape(found.file, {**_DATA, **_PROPERTY})},line={found.line}"
    return f"::{kind}{place}::{_escape(found.text, _DATA)}"


def _escape(text: str, characters: dict[str, str]) -> str:
    return "".join(characters.get(character, character) for character in text)
