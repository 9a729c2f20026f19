"""Writes the answers of vLLM's score and rerank API, for any engine that compares texts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from lmi_server.dialects.framing import encode

PAIRED = frozenset({"text_1", "text_2", "queries", "items", "data_1", "data_2"})
"""The fields that mark a body on LMI's own routes as a score request."""


def score_body(model: str, scores: Sequence[float], prompt_tokens: int) -> bytes:
    """Return the answer of /score: one score per pair, in order."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    head = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time()), "model": model}
    return encode({**head, "data": data, "usage": usage})


def rerank_body(model: str, documents: Any, relevances: Sequence[float], top_n: int, prompt_tokens: int) -> bytes:
    """Return the answer of /rerank: the `top_n` (0: all) most relevant documents with their scores, best first.

    A document is a text, or an object whose `content` has parts that are not text, such as images.
    """
    given = documents if isinstance(documents, list) else [documents]
    # sorted() is stable: documents of equal relevance keep their order.
    ranked = sorted(range(len(given)), key=lambda index: -relevances[index])
    results = [
        {"index": index, "document": _document(given[index]), "relevance_score": relevances[index]} for index in ranked
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    head = {"id": f"rerank-{secrets.token_hex(16)}", "model": model}
    return encode({**head, "usage": usage, "results": results[: top_n or None]})


def _document(document: Any) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document, "multi_modal": None}
    return {"text": None, "multi_modal": document.get("content", [])}
