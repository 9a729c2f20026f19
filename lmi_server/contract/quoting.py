"""How a message quotes what a client, a file or an archive says: cut, and with escapes for what cannot be printed."""

from __future__ import annotations

LONGEST = 100  # characters


def excerpt(text: str, longest: int = LONGEST) -> str:
    """Return the text as a message may quote it: at most `longest` characters, unprintable ones as escapes.

    Line ends, control characters, marks of the direction of writing and lone surrogates are unprintable. So a quoted
    text forges no line, controls no terminal, and can always be encoded. The cost does not grow with the text.
    """
    start = text[:longest]
    if not start.isprintable():
        start = "".join(character if character.isprintable() else _escape(character) for character in start)
    return start if len(text) <= longest else f"{start}... ({len(text)} characters)"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
