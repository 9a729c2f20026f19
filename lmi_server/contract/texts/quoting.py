"""How messages and logs show what a client, a file or an archive says: bounded, and without control characters."""

from __future__ import annotations

LONGEST = 100  # characters
LONGEST_MESSAGE = 8192  # characters of a whole message, whatever it quotes
LONGEST_RECORD = 128 * 1024  # characters of a record of a log, with its traceback
_LONGEST_WORD = 512

# What would let a text look like lines of a log, control a terminal, or turn the order of its characters.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *_DIRECTIONS)}
_IN_RECORD = _ESCAPES | {ord("\n"): "\n  "}
_ON_ONE_LINE = _ESCAPES | {ord("\t"): r"\t", ord("\n"): r"\n", ord("\r"): r"\r"}

NOT_FOR_TERMINALS = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029, *_DIRECTIONS)}
"""The escapes in JSON of what JSON leaves as it is, and still moves a cursor, ends a line or turns the order."""


def excerpt(text: str, longest: int = LONGEST) -> str:
    """Return the text as a message may quote it: at most `longest` characters, unprintable ones as escapes.

    Line ends, control characters, marks of the direction of writing and lone surrogates are unprintable. So a quoted
    text forges no line, controls no terminal, and can always be encoded. The cost does not grow with the text.
    """
    start = text[:longest]
    if not start.isprintable():
        start = "".join(character if character.isprintable() else _escape(character) for character in start)
    return start if len(text) <= longest else f"{start}... ({len(text)} characters)"


def one_line(text: str) -> str:
    """Return the whole text as one line of a message: what ends lines or controls a terminal is there as escapes.

    So are marks of the direction of writing and lone surrogates. Spaces of any width and joined characters stay: a path
    in the message has to name its file.
    """
    return text if text.isprintable() else sendable(text.translate(_ON_ONE_LINE))


def shorten(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return a whole message of at most `longest` characters, and a note if it was longer.

    It ends with a word if it can: half a password would not be known for one.
    """
    if len(message) <= longest:
        return message
    end = message.rfind(" ", longest - _LONGEST_WORD, longest)
    return f"{message[: end if end > 0 else longest]}... ({len(message)} characters)"


def sendable(text: str) -> str:
    """Return the text with escapes in place of lone surrogates."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def sendable_message(text: str) -> str:
    """Return the message of an error with escapes in place of lone surrogates, shortened if it is very long."""
    return sendable(shorten(text))


def as_record(text: str) -> str:
    """Return the text of a record of a log: its further lines are indented, so that none looks like another record."""
    return text if text.isprintable() else text.translate(_IN_RECORD)


def for_terminal(text: str) -> str:
    """Return the text as a terminal may print it: line ends and tabs stay, other control characters are escapes."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
