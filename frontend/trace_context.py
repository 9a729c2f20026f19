"""The header traceparent of W3C's Trace Context: which trace a request belongs to."""

from __future__ import annotations

import re

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


def trace_id_of(header: str) -> str:
    """Return the id of the trace that a header names, "" if the header is not valid."""
    match = _TRACEPARENT.fullmatch(header)
    return "" if match is None else match[1]
