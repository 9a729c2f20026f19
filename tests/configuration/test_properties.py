"""The reader of `.properties` files against the grammar of java.util.Properties.load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmi_server.configuration.properties import edited_properties, parse_properties, read_properties
from lmi_server.contract.errors import ConfigurationError


def values(text: str) -> dict[str, str]:
    return {key: entry.value for key, entry in parse_properties(text, "f").entries.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": "1"}),
        ("a:1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("a\t \f1", {"a": "1"}),
        ("  a  =  1", {"a": "1"}),
        ("a = = 1", {"a": "= 1"}),
        ("a : = 1", {"a": "= 1"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("=1", {"": "1"}),
        ("a=1  ", {"a": "1  "}),
        ("a=b=c:d e", {"a": "b=c:d e"}),
        ("a=1 # no comment", {"a": "1 # no comment"}),
        ("", {}),
        ("\n \t\f\n", {}),
    ],
)
def test_separators(text: str, expected: dict[str, str]) -> None:
    assert values(text) == expected


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_every_line_end_ends_an_entry_and_a_comment(end: str) -> None:
    text = end.join(["# one \\", "a=1", "  ! two", "", "b=2", ""])
    assert values(text) == {"a": "1", "b": "2"}


def test_other_line_separators_of_unicode_are_part_of_the_value() -> None:
    assert values("a=1\u2028b=2\x0bc\x85d") == {"a": "1\u2028b=2\x0bc\x85d"}


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_continued_line_loses_the_leading_blanks_of_the_next(end: str) -> None:
    assert values(f"a=1,\\{end} \t\f2,\\{end}3") == {"a": "1,2,3"}


def test_a_continued_line_may_begin_like_a_comment() -> None:
    assert values("a=1\\\n#2") == {"a": "1#2"}


def test_an_even_number_of_backslashes_does_not_continue() -> None:
    assert values("a=1\\\\\nb=2") == {"a": "1\\", "b": "2"}


def test_a_blank_line_ends_a_continuation() -> None:
    assert values("a=1\\\n\nb=2") == {"a": "1", "b": "2"}


def test_a_backslash_at_the_end_of_the_file_is_dropped() -> None:
    assert values("a=1\\") == {"a": "1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\ b\=c\:d=1", {"a b=c:d": "1"}),
        (r"\#a=1", {"#a": "1"}),
        (r"a=\t\n\r\f\z\"\\", {"a": '\t\n\r\fz"\\'}),
        (r"a=\ 1", {"a": " 1"}),
        (r"a=\u00e9\u20AC", {"a": "é€"}),
        (r"a=\ud83d\ude00", {"a": "😀"}),
        (r"\u0061=1", {"a": "1"}),
        (r"a=\\u00e9", {"a": r"\u00e9"}),
        ("a=é😀", {"a": "é😀"}),
    ],
)
def test_escapes(text: str, expected: dict[str, str]) -> None:
    assert values(text) == expected


@pytest.mark.parametrize("value", [r"\u12", r"\u", r"\u12g4", r"x\uu0041", r"\u-123"])
def test_a_malformed_escape_is_an_error_with_file_and_line(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^serving\.properties:3: malformed escape"):
        parse_properties(f"a=1\n\nb={value}", "serving.properties")


@pytest.mark.parametrize("value", [r"\ud83d", r"\ude00\ud83d", r"\ud83dx"])
def test_half_a_character_is_an_error(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^f:1: .*half a character"):
        parse_properties(f"a={value}", "f")


def test_the_line_is_where_the_entry_begins() -> None:
    entries = parse_properties("# c\n\na=1\\\n 2\r\nb=3", "f").entries
    assert [(entry.key, entry.line) for entry in entries.values()] == [("a", 3), ("b", 5)]


def test_the_last_of_several_entries_wins_with_a_warning() -> None:
    parsed = parse_properties("a=1\nb=2\na=3", "f")
    assert parsed.entries["a"].value == "3"
    assert parsed.warnings == ("f:3: a was given in line 1 already; this one is used",)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes("\ufeffa=é".encode())
    assert read_properties(path).entries["a"].value == "é"


def test_a_file_that_is_not_utf8_is_read_as_java_would(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes("a=é".encode("iso-8859-1"))
    parsed = read_properties(path)
    assert parsed.entries["a"].value == "é"
    assert parsed.warnings == (f"{path}: is not valid UTF-8 and was read as ISO-8859-1",)


def test_utf16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes("a=1".encode("utf-16"))
    with pytest.raises(ConfigurationError, match="save it as UTF-8"):
        read_properties(path)


def test_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigurationError, match=f"{path}: cannot be read: is a pipe or a device; put a file"):
            read_properties(path)


def test_a_far_too_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigurationError, match=f"{path}: cannot be read: is larger than 16 MiB; make it shorter"):
        read_properties(path)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_properties(tmp_path)


# An independent writer: each character in one of the ways that Java would read back as itself.
PLAIN = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789._-/"


@st.composite
def written(draw: st.DrawFn, min_size: int = 0) -> tuple[str, str]:
    """Return a text and a way to write it, continuation lines among it."""
    alphabet = st.one_of(st.sampled_from(PLAIN + " =:#!\\\t\n\r\f"), st.characters(exclude_categories=["Cs"]))
    characters = draw(st.lists(alphabet, min_size=min_size))
    pieces = []
    for character in characters:
        if draw(st.integers(0, 9)) == 0:
            pieces.append(draw(st.sampled_from(["\\\n", "\\\r\n  ", "\\\r\t"])))
        pieces.append(draw(st.sampled_from(ways_to_write(character))))
    return "".join(characters), "".join(pieces)


def ways_to_write(character: str) -> list[str]:
    units = character.encode("utf-16-be")
    ways = ["".join(f"\\u{units[i]:02X}{units[i + 1]:02x}" for i in range(0, len(units), 2))]
    named = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f"}
    if character in named:
        return [*ways, named[character]]
    if character in " =:#!\\":
        return [*ways, "\\" + character]
    return [*ways, character]


@given(st.lists(st.tuples(written(min_size=1), written())), st.sampled_from(["=", ":", " ", " = ", "\t:\f"]))
def test_what_is_written_is_read_back(pairs: list[tuple[tuple[str, str], tuple[str, str]]], separator: str) -> None:
    text = "\n".join(f"{key_text}{separator}{value_text}" for (_, key_text), (_, value_text) in pairs)
    assert values(text) == {key: value for (key, _), (value, _) in pairs}


@given(st.text(st.one_of(st.sampled_from("\\\\\\u0dD8c =:#!\n\r\tab"), st.characters())))
def test_no_text_does_more_than_raise_a_configuration_error(text: str) -> None:
    problem = "f:"
    try:
        parse_properties(text, "f")
    except ConfigurationError as error:
        problem = error.message
    assert problem.startswith("f:")


@given(data=st.binary())
def test_no_bytes_do_more_than_raise_a_configuration_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "f"
    path.write_bytes(data)
    problem = str(path)
    try:
        read_properties(path)
    except ConfigurationError as error:
        problem = error.message
    assert problem.startswith(str(path))


class JavaLines:
    """java.util.Properties' LineReader and load0, written after their description: one character at a time."""

    def __init__(self, text: str) -> None:
        self.entries: dict[str, str] = {}
        for line in self._logical(text):
            self._load(line)

    def _logical(self, text: str) -> list[str]:
        lines, line, position = [], "", 0
        skip_blanks, is_comment, is_new, escaped, after_continuation = True, False, True, False, False
        while position < len(text):
            character = text[position]
            position += 1
            if skip_blanks:
                if character in " \t\f" or (not after_continuation and character in "\r\n"):
                    continue
                skip_blanks = after_continuation = False
            if is_new:
                is_new = False
                if character in "#!":
                    is_comment = True
                    continue
            if character not in "\r\n":
                line += character
                escaped = not escaped if character == "\\" else False
                continue
            if is_comment or not line:  # since Java 9 a backslash at the end of a comment is a part of it
                is_comment, is_new, skip_blanks, escaped, line = False, True, True, False, ""
                continue
            if escaped:
                line, skip_blanks, after_continuation, escaped = line[:-1], True, True, False
                if character == "\r" and text[position : position + 1] == "\n":
                    position += 1
                continue
            lines.append(line)
            line, is_new, skip_blanks = "", True, True
        if line and not is_comment:
            lines.append(line[:-1] if escaped else line)
        return lines

    def _load(self, line: str) -> None:
        end = start = None
        escaped = has_separator = False
        for index, character in enumerate(line):
            if character in "=:" and not escaped:
                end, start, has_separator = index, index + 1, True
                break
            if character in " \t\f" and not escaped:
                end, start = index, index + 1
                break
            escaped = not escaped if character == "\\" else False
        end, start = (len(line), len(line)) if end is None or start is None else (end, start)
        while start < len(line):
            if line[start] not in " \t\f":
                if has_separator or line[start] not in "=:":
                    break
                has_separator = True
            start += 1
        self.entries[self._plain(line[:end])] = self._plain(line[start:])

    def _plain(self, text: str) -> str:
        result, position = "", 0
        while position < len(text):
            if text[position] == "\\":
                position += 1
                named = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
                result += named.get(text[position : position + 1], text[position : position + 1])
            else:
                result += text[position]
            position += 1
        return result


@given(st.text(st.sampled_from("\\\\\\ab =:#! \t\f\n\r"), max_size=60))
@example("#\\\r\\\\")
def test_every_text_is_read_as_java_reads_it(text: str) -> None:
    assert values(text) == JavaLines(text).entries


@given(
    st.text(
        st.one_of(st.sampled_from("\\ab =:#\n\r"), st.characters(exclude_categories=["Cs"], exclude_characters="u"))
    )
)
def test_what_was_read_is_read_the_same_again(text: str) -> None:
    once = values(text)
    again = "\n".join(f"{escape(key)}={escape(value)}" for key, value in once.items())
    assert values(again) == once


def escape(text: str) -> str:
    return "".join(ways_to_write(character)[0] for character in text)


@pytest.mark.parametrize(
    ("text", "changes", "edited"),
    [
        ("a=1\n# b=2\nb=3\n", {"b": "4"}, "a=1\n# b=2\nb=4\n"),
        ("a=1\nb=3", {"a": None, "c": "5"}, "b=3\nc=5\n"),
        ("a=1,\\\n  2\nb : x\n", {"a": None}, "b : x\n"),
        ("a=1\n\na=2\n", {"a": "3"}, "a=3\n\n"),
        ("", {"a": "1", "b": None}, "a=1\n"),
    ],
)
def test_what_is_not_changed_stays_as_it_is_written(text: str, changes: dict[str, str | None], edited: str) -> None:
    assert edited_properties(text, changes) == edited
