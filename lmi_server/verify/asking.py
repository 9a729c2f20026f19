"""Asks a server for greedy answers with their log-probabilities."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from lmi_server.bench.workload import Prompt
from lmi_server.client.server_calls import ServerCalls, UnreachableError
from lmi_server.contract.errors import ConfigurationError

_TOP = 5  # tokens at each place whose log-probabilities are asked for

_NO_ANSWER = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, its log-probability, and those of the likeliest tokens at its place."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt, and the seconds until it was complete; `error` says why there is none.

    `is_missing`: the server has not answered at all, or not in time.
    """

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    seconds: float = 0.0
    error: str | None = None
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared: a model of a server, or one version of it."""

    title: str
    server: ServerCalls
    model: str
    version: str | None = None

    def ask(self, prompt: Prompt, output_tokens: int, timeout_s: float) -> Answer:
        """Return the greedy answer to a prompt; a failure is an answer, too."""
        is_chat = bool(prompt.messages)
        query = "" if self.version is None else f"?{urlencode({'model_version': self.version})}"
        path = f"/v1/{'chat/completions' if is_chat else 'completions'}{query}"
        began = time.perf_counter()
        try:
            data = self.server.data("POST", path, timeout_s, self._body(prompt, output_tokens))
            seconds = time.perf_counter() - began
            choice = json.loads(data)["choices"][0]
            text = choice["message"].get("content") or "" if is_chat else choice["text"]
            return Answer(str(text), tuple(scored_tokens(choice.get("logprobs") or {})), seconds)
        except UnreachableError as error:
            return Answer(error=error.message, is_missing=True)
        except ConfigurationError as error:
            return Answer(error=error.message)
        except _NO_ANSWER as error:
            return Answer(error=f"the answer cannot be read: {error!r}"[:300])

    def _body(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        tokens = min(prompt.output_tokens or output_tokens, output_tokens)
        body = {"model": prompt.adapter or self.model, "max_tokens": tokens, "temperature": 0}
        if prompt.messages:
            return {**body, "messages": prompt.chat, "logprobs": True, "top_logprobs": _TOP}
        return {**body, "prompt": prompt.text, "logprobs": _TOP}


def scored_tokens(found: Mapping[str, Any]) -> Iterator[ScoredToken]:
    """Yield the tokens of a choice's `logprobs`, of a chat or of a completion.

    Raises ValueError, TypeError and the like for what is no log-probability.
    """
    for entry in found.get("content") or ():
        top = {str(each["token"]): finite(each["logprob"]) for each in entry.get("top_logprobs") or ()}
        yield ScoredToken(str(entry["token"]), finite(entry["logprob"]), top)
    texts, tops = found.get("tokens") or (), found.get("top_logprobs")
    for text, value, top in zip(texts, found.get("token_logprobs") or (), tops or [None] * len(texts), strict=True):
        likeliest = {str(name): finite(logprob) for name, logprob in (top or {}).items()}
        yield ScoredToken(str(text), finite(value), likeliest)


def finite(value: Any) -> float:
    """Return a log-probability. Raises ValueError and TypeError for what is none."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a log-probability is a finite number")
    return number
