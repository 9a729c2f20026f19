"""The tokens of a request, as its answer says; or an estimate, if it does not.

The answer is not parsed: the last field of that name counts. In the texts of an answer quotes are escaped, so that no
text looks like a field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmi_server.contract.protocol import Summary

_TAIL = 8192  # bytes at the end of an answer that are searched
_EVENT = b"data:"
_BYTES_PER_TOKEN = 4  # of English prose, roughly
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})\b')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})\b')
_LENGTH = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"(?:length|max_tokens)"')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})\b')


class UsageMeter:
    """Looks at an answer as it passes. `prompt_bytes` is the length of the request."""

    def __init__(self, prompt_bytes: int) -> None:
        self._prompt_bytes = prompt_bytes
        self._tail = b""
        self._events = 0

    def add(self, data: bytes) -> None:
        self._events += data.count(_EVENT)
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]

    def summary(self) -> Summary | None:
        """Return what the answer says, None if it says nothing."""
        prompt, output = _last(_PROMPT.findall(self._tail)), _last(_OUTPUT.findall(self._tail))
        if prompt is None and output is None:
            return None
        cached = _last(_CACHED.findall(self._tail)) or 0
        ended = "length" if _LENGTH.search(self._tail) else "eos_token"  # the names of LMI
        return Summary(ended, prompt or 0, output or 0, min(cached, prompt or 0), 1, None, 0.0, 0.0)

    def tokens(self, summary: Summary | None, failed: bool) -> int:
        """Return the tokens that the request counts for: estimated by events and bytes without a `summary`."""
        if summary is not None:
            return summary.prompt_tokens + summary.output_tokens
        return 0 if failed else self._prompt_bytes // _BYTES_PER_TOKEN + self._events


def _last(found: Sequence[bytes]) -> int | None:
    return int(found[-1]) if found else None
