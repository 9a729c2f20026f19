"""Numbers of bytes in messages."""

from __future__ import annotations


def in_words(size: int) -> str:
    """Return a number of bytes as text: "1.5 GiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
