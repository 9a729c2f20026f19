"""Quick fixes: what the messages of `check` advise, as edits of the line that they are about."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmi_server.explain.findings import Finding
from lmi_server.lsp.offers import Edit

_NEAREST = re.compile(r"(?:, |; )?did you mean ([^?\n]+)\?$")
_UNKNOWN = re.compile(r"unknown key (\S+?)[,;]")
_WRONG = re.compile(r'\S+ = "([^"\n]*)" is not allowed; ')
_LONGEST = 5000  # characters of a message that is searched
_COMMENT = "; a comment needs a line of its own"
_BEHIND = re.compile(r"[ \t]([#!])")


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
