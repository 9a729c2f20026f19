"""The text in an answer and the log-probabilities of its tokens, whatever API it is of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lmi_server.verify.asking import Answer, ScoredToken

_TEXTS = frozenset(
    {"content", "text", "generated_text", "reasoning_content", "output_text", "delta", "partial_json", "arguments"}
)
_DEEPEST = 32
_MAX_LINES = 10_000  # of a stream
_BESIDE = frozenset({"logprobs", "top_logprobs", "details", "prefill"})  # they repeat the text, in tokens


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
            yield from _of_choice(choice["logprobs"])
    token, details = document.get("token"), document.get("details")  # of LMI: in a stream, and in a whole answer
    for entry in [token] if token else (details or {}).get("tokens") or ():
        value = entry["log_prob"] if "log_prob" in entry else entry["logprob"]
        yield ScoredToken(str(entry["text"]), _finite(value), {})


def _of_choice(found: Mapping[str, Any]) -> Iterator[ScoredToken]:
    for entry in found.get("content") or ():
        top = {str(each["token"]): _finite(each["logprob"]) for each in entry.get("top_logprobs") or ()}
        yield ScoredToken(str(entry["token"]), _finite(entry["logprob"]), top)
    texts, tops = found.get("tokens") or (), found.get("top_logprobs")
    for text, value, top in zip(texts, found.get("token_logprobs") or (), tops or [None] * len(texts), strict=True):
        likeliest = {str(name): _finite(logprob) for name, logprob in (top or {}).items()}
        yield ScoredToken(str(text), _finite(value), likeliest)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a log-probability is a finite number")
    return number
