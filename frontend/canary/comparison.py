"""The answers of two versions to the same request, compared as `lmi-server verify` does it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.canary.sessions import RequestCounts, SessionCounts
from lmi_server.bench.paired import PairedRatios
from lmi_server.verify.asking import Answer, ScoredToken, finite, scored_tokens
from lmi_server.verify.comparison import Pair, compare

_KEPT = 500  # ratios
_TEXTS = frozenset(
    {"content", "text", "generated_text", "reasoning_content", "output_text", "delta", "partial_json", "arguments"}
)
_DEEPEST = 32
_MAX_LINES = 10_000  # of a stream
_BESIDE = frozenset({"logprobs", "top_logprobs", "details", "prefill"})  # they repeat the text, in tokens


@dataclass
class Pairs(RequestCounts):
    """How many answers were compared (`requests`), and how many of them are others.

    `refused` of the changed ones were refused by one version alone. Where both answers have log-probabilities, `shifts`
    of them were compared, of the tokens before a change; `shifted` is the sum of their changes in nats. `ties` of the
    changed answers differ first in a token that the old version found as likely as its own.
    """

    changed: int = 0
    refused: int = 0
    ties: int = 0
    shifts: int = 0
    shifted: float = 0.0

    @property
    def mean_shift(self) -> float | None:
        """Return by how many nats a log-probability changed in the mean."""
        return self.shifted / self.shifts if self.shifts else None


def compare_answers(old: bytes, new: bytes) -> Pair:
    """Compare two whole answers. It may take a tenth of a second, and is for a thread."""
    return compare("", read_answer(old), read_answer(new))


class Compared:
    """What was compared, what was `skipped`, and how long the new answers took beside the old ones."""

    def __init__(self) -> None:
        self.skipped = 0
        self.largest_shift = 0.0
        self.ratios: deque[float] = deque(maxlen=_KEPT)
        self._counts = SessionCounts(Pairs)

    @property
    def total(self) -> Pairs:
        return self._counts.total

    def add(self, pair: Pair, ratio: float, session: bytes | None = None) -> None:
        """Add two answers; `ratio` is the new duration as a multiple of the old one."""
        shifts = [abs(shift) for shift in pair.shifts]
        self.largest_shift = max(self.largest_shift, *shifts, 0.0)
        for counts in self._counts.counts_of(session):
            counts.requests += 1
            counts.changed += pair.changed
            counts.ties += pair.is_tie
            counts.shifts += len(shifts)
            counts.shifted += sum(shifts)
        self.ratios.append(ratio)

    def add_refusal(self, session: bytes | None = None) -> None:
        """Note that one version has answered a request, and the other one refused it."""
        for counts in self._counts.counts_of(session):
            counts.requests += 1
            counts.changed += 1
            counts.refused += 1

    def without_most_changed(self) -> Pairs:
        """Return the counts without the session that has most changed answers."""
        return self._counts.without_worst(lambda each: each.changed)

    def without_most_shifted(self) -> Pairs:
        """Return the counts without the session whose log-probabilities changed most."""
        return self._counts.without_worst(lambda each: each.shifted)

    @property
    def latency(self) -> PairedRatios | None:
        return PairedRatios.from_values(self.ratios) if self.ratios else None

    def describe(self) -> dict[str, Any]:
        """Return what the management API says."""
        latency, total = self.latency, self.total
        times = {} if latency is None else {"timesAsLong": latency.median, "interval": list(latency.interval)}
        counts = {"answers": total.requests, "changed": total.changed, "refusedByOne": total.refused}
        logprobs = {} if total.mean_shift is None else {
            "logProbs": {
                "compared": total.shifts, "meanShift": total.mean_shift, "largestShift": self.largest_shift,
                "ties": total.ties,
            }
        }  # fmt: skip
        return {**counts, "skipped": self.skipped, **logprobs, **times}


def read_answer(data: bytes) -> Answer:
    """Return the text of an answer: ids and times differ in equal ones. Without JSON, or with too many lines, it is all
    of the answer.

    The tokens are those of the first sequence, none if one of them has no log-probability.
    """
    documents = list(_documents(data))
    if not documents:
        return Answer(data.decode("latin-1"))
    text = "".join(part for document in documents for part in _texts(document, _DEEPEST))
    try:
        return Answer(text, tuple(token for document in documents for token in _tokens(document)))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return Answer(text)


def _documents(data: bytes) -> Iterator[Any]:
    """Yield what is JSON in an answer: the whole, or its lines unless they are too many."""
    is_whole = data[:1] in (b"{", b"[") and b"\n{" not in data
    if not is_whole and data.count(b"\n") > _MAX_LINES:
        return
    for part in [data] if is_whole else data.split(b"\n"):
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
            elif key not in _BESIDE:
                yield from _texts(held, levels - 1)
    elif isinstance(value, list):
        for held in value:
            yield from _texts(held, levels - 1)


def _tokens(document: Any) -> Iterator[ScoredToken]:
    """Yield the tokens in a document. Raises ValueError, TypeError and the like for what is no log-probability."""
    if not isinstance(document, dict):
        return
    for choice in document.get("choices") or ():
        if choice.get("index", 0) == 0 and choice.get("logprobs"):
            yield from scored_tokens(choice["logprobs"])
    token, details = document.get("token"), document.get("details")  # of LMI: in a stream, and in a whole answer
    for entry in [token] if token else (details or {}).get("tokens") or ():
        value = entry["log_prob"] if "log_prob" in entry else entry["logprob"]
        yield ScoredToken(str(entry["text"]), finite(value), {})
