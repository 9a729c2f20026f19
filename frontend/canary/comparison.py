"""The answers of two versions to the same request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmi_server.bench.paired import PairedRatios

_TEXTS = frozenset({"content", "text", "generated_text", "reasoning_content", "output_text", "delta", "partial_json"})
_DEEPEST = 32
_KEPT = 500  # ratios


@dataclass
class Compared:
    """How many answers were compared, how many of them are others, and how long the new ones took beside the old."""

    answers: int = 0
    changed: int = 0
    skipped: int = 0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, old: bytes, new: bytes, ratio: float) -> None:
        """Compare two whole answers; `ratio` is the new duration as a multiple of the old one."""
        self.answers += 1
        self.changed += answer_text(old) != answer_text(new)
        self.ratios.append(ratio)

    @property
    def latency(self) -> PairedRatios | None:
        return PairedRatios.from_values(self.ratios) if self.ratios else None

    def described(self) -> dict[str, Any]:
        """Return what the management API says."""
        latency = self.latency
        times = {} if latency is None else {"timesAsLong": latency.median, "interval": list(latency.interval)}
        return {"answers": self.answers, "changed": self.changed, "skipped": self.skipped, **times}


def answer_text(data: bytes) -> str | bytes:
    """Return the text in an answer, whatever its API is: ids and times differ in equal ones. Bytes if it has none."""
    documents = list(_documents(data))
    text = "".join(part for document in documents for part in _texts(document, _DEEPEST))
    return text if documents else data


def _documents(data: bytes) -> Iterator[Any]:
    """Yield what is JSON in an answer: the whole, or its lines."""
    for part in [data] if data[:1] in (b"{", b"[") and b"\n{" not in data else data.split(b"\n"):
        text = part.strip().removeprefix(b"data:").strip()
        if text[:1] in (b"{", b"["):
            try:
                yield msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue


def _texts(value: Any, levels: int) -> Iterator[str]:
    if not levels:
        return
    if isinstance(value, dict):
        for key, held in value.items():
            if isinstance(held, str):
                if key in _TEXTS:
                    yield held
            else:
                yield from _texts(held, levels - 1)
    elif isinstance(value, list):
        for held in value:
            yield from _texts(held, levels - 1)
