"""The text of an exception in a log, as Python prints it, in parts whose number and cost are bounded.

Python's own formatter follows every cause and note, and every offset of an error of syntax. Code may make any number.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from types import TracebackType

from lmi_server.contract.errors import MAX_CAUSES, cause_of, context_of, message_of
from lmi_server.contract.texts.quoting import LONGEST_RECORD, shorten

_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_MAX_CALLS = 100  # of an exception, half of them at each end
_MAX_NOTES = 30
_MAX_MEMBERS, _MAX_NESTED = 15, 10  # of a group, and groups in groups: as many as Python shows
_LONGEST_LINE = 1000  # characters of a line of code with an error of syntax


def exception_text(error: BaseException) -> str:
    """Return the text of an exception, with its causes before it."""
    parts: list[str] = []
    size = 0
    for part in map(shorten, _chain(error, 0)):
        parts.append(part if part.endswith("\n") else f"{part}\n")
        size += len(part)
        if size > LONGEST_RECORD:
            break
    return "".join(parts).removesuffix("\n")


def _chain(error: BaseException, depth: int) -> Iterator[str]:
    chain = list(itertools.islice(_with_causes(error), MAX_CAUSES + 1))
    if len(chain) > MAX_CAUSES:
        yield f"... more exceptions than {MAX_CAUSES} ...\n"
    for each, joint in reversed(chain[:MAX_CAUSES]):
        yield from _one(each, depth)
        if joint:
            yield joint


def _with_causes(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """Yield an exception and those before it, each with the text between it and the following one."""
    seen: set[int] = set()
    found: BaseException | None = error
    joint = ""
    while found is not None and id(found) not in seen:
        yield found, joint
        seen.add(id(found))
        cause = cause_of(found)
        joint = _CONTEXT if cause is None else _CAUSE
        found = context_of(found) if cause is None else cause


def _one(error: BaseException, depth: int) -> Iterator[str]:
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from _calls(error.__traceback__)
    if isinstance(error, SyntaxError):
        yield from _place(error)
    message = message_of(error.msg if isinstance(error, SyntaxError) else error)
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    yield f"{name}: {message}\n" if message else f"{name}\n"
    yield from _notes(error)
    if isinstance(error, BaseExceptionGroup):
        yield from _members(error.exceptions, depth)


def _calls(trace: TracebackType) -> Iterator[str]:
    count = sum(1 for _ in traceback.walk_tb(trace))
    if count <= _MAX_CALLS:
        yield from traceback.extract_tb(trace).format()
        return
    yield from traceback.extract_tb(trace, _MAX_CALLS // 2).format()
    yield f"  ... {count - _MAX_CALLS} more calls ...\n"
    yield from traceback.extract_tb(trace, -_MAX_CALLS // 2).format()


def _place(error: SyntaxError) -> Iterator[str]:
    """Yield where an error of syntax is, the line, and a mark below its place there."""
    if isinstance(error.filename, str):
        yield f'  File "{error.filename}", line {message_of(error.lineno)}\n'
    if isinstance(error.text, str):
        text = error.text[:_LONGEST_LINE].rstrip()
        line = text.lstrip()
        yield f"    {line}\n"
        indented = len(text) - len(line)
        if isinstance(error.offset, int) and indented < error.offset <= len(text) + 1:
            yield f"    {'^':>{error.offset - indented}}\n"


def _notes(error: BaseException) -> Iterator[str]:
    notes = vars(error).get("__notes__")
    if not isinstance(notes, list | tuple):
        return
    yield from (f"{message_of(note)}\n" for note in notes[:_MAX_NOTES])
    if len(notes) > _MAX_NOTES:
        yield f"... {len(notes) - _MAX_NOTES} more notes ...\n"


def _members(members: tuple[BaseException, ...], depth: int) -> Iterator[str]:
    shown = members[:_MAX_MEMBERS] if depth < _MAX_NESTED else ()
    for number, member in enumerate(shown, 1):
        yield f"  +---------------- {number} ----------------\n"
        for part in _chain(member, depth + 1):
            yield "".join(f"  | {line}" for line in shorten(part).splitlines(keepends=True))
    if len(members) > len(shown):
        yield f"  ... {len(members) - len(shown)} more exceptions ...\n"
