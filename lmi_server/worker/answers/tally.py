"""What is counted of one answer while its text is generated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmi_server.contract.generation import Usage
from lmi_server.contract.protocol import Summary

_NO_USAGE = Usage(0, 0)


@dataclass(slots=True, eq=False)
class GenerationTally:
    """Counts the sequences of one request, which the worker got at `began` (time.monotonic())."""

    began: float
    _sequences: int = 0
    _finish_reason: str = ""
    _prompt_tokens: int = 0
    _output_tokens: int = 0
    _cached_tokens: int = 0
    _first_at: float = math.inf
    _last_at: float = 0.0
    _decode_s: float = 0.0
    _adapter: str = ""

    def count(self, finish_reason: str, usage: Usage | None, first_at: float, last_at: float, adapter: str) -> None:
        """Add a sequence that has ended; its first delta was taken in at `first_at`, its last one came at `last_at`.

        An engine may return the whole output as one delta. `last_at` is the earlier time then, and the time of the
        first of several tokens is not known.
        """
        usage = usage or _NO_USAGE
        if first_at >= last_at and usage.completion_tokens > 1:
            first_at = math.inf
        if not self._sequences:
            self._adapter = adapter
            self._prompt_tokens = usage.prompt_tokens
        self._sequences += 1
        self._finish_reason = finish_reason
        self._last_at = last_at
        self._first_at = min(self._first_at, first_at)
        self._output_tokens += usage.completion_tokens
        self._cached_tokens = max(self._cached_tokens, usage.cached_tokens)
        self._decode_s += max(last_at - first_at, 0.0)

    def summary(self) -> Summary | None:
        """Return what was counted; None if no text was generated."""
        if not self._sequences:
            return None
        return Summary(
            self._finish_reason,
            self._prompt_tokens,
            self._output_tokens,
            self._cached_tokens,
            self._sequences,
            None if self._first_at == math.inf else self._first_at - self.began,
            self._last_at - self.began,
            self._decode_s,
            self._adapter,
        )
