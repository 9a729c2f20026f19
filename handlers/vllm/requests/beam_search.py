"""Beam search over an engine that has none: each step asks for the likeliest next tokens of every beam.

vLLM's engine lost its own beam search; vLLM's server does it in this way, too. Scores, and when a search ends, are as
in transformers' generate(): the sum of log probabilities, divided by the number of new tokens to the power of
`length_penalty`.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NamedTuple

from lmi_server.contract.generation import BeamSearch, TopToken

Likeliest = Callable[[Sequence[int], int], Awaitable[Sequence[TopToken]]]
"""Returns so many of the likeliest tokens after a prompt and the ids of new tokens."""


class Beam(NamedTuple):
    """New tokens and the sum of their log probabilities; `ended` if the last one ends the sequence."""

    tokens: tuple[TopToken, ...] = ()
    log_prob: float = 0.0
    ended: bool = False

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def with_token(self, token: TopToken, ends: frozenset[int]) -> Beam:
        return Beam((*self.tokens, token), self.log_prob + (token.logprob or 0.0), token.id in ends)


async def search(
    settings: BeamSearch, max_tokens: int, ends: frozenset[int], likeliest: Likeliest
) -> AsyncGenerator[Beam, None]:
    """Yield the best running beam of each step, then the best of all. `ends` are the tokens that end a sequence."""
    width = settings.width
    running, ended = [Beam()], list[Beam]()

    def score(beam: Beam) -> float:
        return beam.log_prob / math.pow(len(beam.tokens), settings.length_penalty)

    while running and len(running[0].tokens) < max_tokens:
        steps = await asyncio.gather(*(likeliest(beam.ids, 2 * width) for beam in running))
        grown = [
            beam.with_token(token, ends)
            for beam, step in zip(running, steps, strict=True)
            for token in step[: 2 * width]
        ]
        grown = heapq.nlargest(2 * width, grown, key=lambda beam: beam.log_prob)
        ended += [beam for beam in grown[:width] if beam.ended]
        ended = heapq.nlargest(width, ended, key=score)
        running = [beam for beam in grown if not beam.ended][:width]
        if len(ended) == width and (not running or _is_done(settings, max_tokens, running[0], score(ended[-1]))):
            running = []
        else:
            yield running[0]
    yield max(ended if len(ended) == width else [*ended, *running], key=score)


def _is_done(settings: BeamSearch, max_tokens: int, best: Beam, worst_ended: float) -> bool:
    """Return whether no running beam can become better than the worst ended beam."""
    if settings.early_stopping is True:
        return True
    length = len(best.tokens)
    if settings.early_stopping == "never" and settings.length_penalty > 0:
        length = max_tokens
    return worst_ended >= best.log_prob / math.pow(length, settings.length_penalty)
