"""Joins what belongs together in the output of a worker: a traceback, and the line of a logger that it follows."""

from __future__ import annotations

import re

_BEGINNING = "Traceback (most recent call last):"
_BETWEEN = {
    "",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
}
_OF_LOGGER = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_LONGEST = 64 * 1024  # characters of a record
_INDENT = "  "


class Tracebacks:
    """Joins the lines of one stream to records.

    A line of a logger is one record with the indented lines behind it, and with the traceback that follows it. A
    traceback ends with the first line that is not indented, unless the exception before or behind it follows. Every
    other line is a record by itself.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self._has_traceback = False
        self._is_inside = False  # of a traceback whose last line is still to come

    @property
    def is_open(self) -> bool:
        """Whether the next lines may belong to a traceback that has begun."""
        return self._has_traceback

    def add(self, line: str) -> list[str]:
        """Take a line; return the records that are complete."""
        if self._lines and self._continues(line) and self._size + len(line) <= _LONGEST:
            self._append(line)
            return []
        complete = self.take()
        if line == _BEGINNING or _OF_LOGGER.match(line):
            self._append(line)
            return complete
        return [*complete, line]

    def take(self) -> list[str]:
        """Return the record that is not complete as it is, if there is one."""
        lines, self._lines = self._lines, []
        self._size = 0
        self._has_traceback = self._is_inside = False
        return [_join(lines)] if lines else []

    def _continues(self, line: str) -> bool:
        if self._is_inside:
            return True
        if line == _BEGINNING:  # a further traceback begins behind indented lines
            return self._has_traceback or len(self._lines) == 1
        return line in _BETWEEN if self._has_traceback else line[:1].isspace()

    def _append(self, line: str) -> None:
        if line == _BEGINNING:
            self._has_traceback = self._is_inside = True
        elif line and not line[0].isspace():
            self._is_inside = False
        self._lines.append(line)
        self._size += len(line) + 1


def _join(lines: list[str]) -> str:
    """Return the lines as one text. Those of this project's workers are indented to show where a record ends."""
    first, *others = lines
    if all(line.startswith(_INDENT) for line in others):
        others = [line.removeprefix(_INDENT) for line in others]
    return "\n".join([first, *others]).rstrip()
