"""Reads the Java `.properties` grammar, as `java.util.Properties.load` does.

It is more forgiving than Java in two ways: the file is read as UTF-8 (as ISO-8859-1 if it is not valid UTF-8), and a
byte order mark is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_server.contract.errors import ConfigurationError
from lmi_server.files.regular_files import read_regular

_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")  # not str.splitlines, which knows more line ends than Java does
_ENTRY = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*(?:[=:][ \t\f]*)?(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One key and its value, escapes resolved. `line` is the number of its first line, counted from 1."""

    key: str
    value: str
    line: int


@dataclass(frozen=True, slots=True)
class Properties:
    """The entries of one file by key, in the order of the file, and warnings about the file."""

    entries: Mapping[str, Entry]
    warnings: tuple[str, ...]


def read_properties(path: Path) -> Properties:
    """Read the file at `path`. Raises ConfigurationError if it cannot be read or holds a malformed escape."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    text, warnings = decode_properties(data, str(path))
    parsed = parse_properties(text, str(path))
    return Properties(parsed.entries, (*warnings, *parsed.warnings))


def parse_properties(text: str, file: str) -> Properties:
    """Parse `text`; `file` is its name in messages. If a key occurs twice, the last entry wins, with a warning.

    Raises ConfigurationError if an escape is malformed.
    """
    entries: dict[str, Entry] = {}
    warnings: list[str] = []
    for line, content in _logical_lines(text):
        entry = _parse_entry(content, line, file)
        earlier = entries.get(entry.key)
        if earlier is not None:
            warnings.append(f"{file}:{line}: {entry.key} was given in line {earlier.line} already; this one is used")
        entries[entry.key] = entry
    return Properties(entries, tuple(warnings))


def edited_properties(text: str, changes: Mapping[str, str | None]) -> str:
    """Return `text` with new values for the keys of `changes`; None removes a key. All other lines stay as they are."""
    missing = {key: value for key, value in changes.items() if value is not None}
    lines: list[str] = []
    for content, natural in _spans(text):
        key = None if content is None else _parse_entry(content, 0, "").key
        if key not in changes:
            lines += natural
        elif key in missing:
            lines.append(f"{key}={missing.pop(key)}")
    lines = lines[:-1] if lines and not lines[-1] else lines
    return "".join(f"{line}\n" for line in (*lines, *(f"{key}={value}" for key, value in missing.items())))


def _spans(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield all lines of the file: those of an entry together, with its content, other lines with None."""
    lines = _LINE_END.split(text)
    starts = dict(_logical_lines(text))
    number = 0
    while number < len(lines):
        content = starts.get(number + 1)
        end = number + 1
        if content is not None:
            while end < len(lines) and _ends_in_escape(lines[end - 1]):
                end += 1
        yield content, lines[number:end]
        number = end


def decode_properties(data: bytes, file: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file, and warnings. Raises ConfigurationError if the file is UTF-16."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigurationError(f"{file}: is UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig"), ()
    except UnicodeDecodeError:
        # java.util.Properties reads a stream as ISO-8859-1, so an old file may be in that encoding.
        return data.decode("iso-8859-1"), (f"{file}: is not valid UTF-8 and was read as ISO-8859-1",)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, content) of each entry: comments left out, continued lines joined."""
    parts: list[str] = []
    first = 0
    continued = False
    for number, natural in enumerate(_LINE_END.split(text), start=1):
        line = natural.lstrip(_BLANKS)
        if not continued:
            if not line or line[0] in "#!":
                continue
            parts, first = [], number
        continued = _ends_in_escape(line)
        parts.append(line[:-1] if continued else line)
        if not continued and any(parts):
            yield first, "".join(parts)
    if continued:  # the file ends with a backslash; Java makes an entry of it, even an empty one
        yield first, "".join(parts)


def _ends_in_escape(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _parse_entry(content: str, line: int, file: str) -> Entry:
    match = _ENTRY.fullmatch(content)
    assert match is not None, "the expression takes every logical line"
    key, value = (_unescape(part, line, file) for part in match.groups())
    return Entry(key, value, line)


def _unescape(text: str, line: int, file: str) -> str:
    if "\\" not in text:
        return text

    def replace(match: re.Match[str]) -> str:
        escape = match[1]
        if escape == "u":
            raise ConfigurationError(
                f"{file}:{line}: malformed escape {text[match.start() : match.start() + 6]!r}: "
                r"four hexadecimal digits must follow \u (write \\u for a backslash and a u)"
            )
        if len(escape) > 1:
            return chr(int(escape[1:], 16))
        return _CONTROL.get(escape, escape)

    return _join_surrogates(_ESCAPE.sub(replace, text), line, file)


def _join_surrogates(text: str, line: int, file: str) -> str:
    r"""Join each pair of surrogates to one character: Java writes those beyond U+FFFF as \ud83d\ude00."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            rf"{file}:{line}: a \u escape between d800 and dfff is half a character; its other half is missing"
        ) from error
