"""Numbers of bytes and of seconds in messages."""

from __future__ import annotations


def in_words(size: int) -> str:
    """Return a number of bytes as text: "1.5 GiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def duration_in_words(seconds: float) -> str:
    """Return a number of seconds as text: "1 min 5 s"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
