"""Speculative decoding by prompt lookup: proposes tokens that followed the same words earlier in the sequence.

A step computes the newest token of a sequence and its draft at once, and keeps the draft as far as it is what the
sampler would have chosen token by token. Each of these tokens is drawn with the noise of its own place in the output
(`gumbel.py`). So sampling too gives exactly the tokens that it gives without drafts, and a draft is accepted with the
probability of its tokens, as in speculative sampling (Leviathan et al., 2023).

Further rows of a step cost time. A token is proposed if its chance of being accepted is higher than the share that a
row has in the time of the step, since otherwise the batch generates fewer tokens per second with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NGRAMS = (3, 2)  # tokens that have to be the same; the longer one first
_FIRST_CHANCE = 0.5  # that the next drafted token is accepted, before anything is known
_SMOOTHING = 0.25  # weight of the newest draft
_RECOVERY = 0.01  # by which the chance returns to the first one with each token, so that drafts are tried again


class PromptLookup:
    """The drafts of one sequence: up to `length` tokens that followed the newest occurrence of its last words."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._followers: dict[tuple[int, ...], int] = {}  # where the token behind an n-gram is
        self._indexed = 0  # tokens whose n-grams are in `_followers`
        self.chance = _FIRST_CHANCE

    def propose(self, tokens: Sequence[int], most: int, least_chance: float) -> list[int]:
        """Return a draft of up to `most` tokens; each is accepted with a chance of `least_chance` or more."""
        self._index(tokens)
        length = min(most, self._promising(least_chance))
        if length <= 0:
            self.chance += _RECOVERY * (_FIRST_CHANCE - self.chance)
            return []
        for size in _NGRAMS:
            place = self._followers.get(tuple(tokens[-size:]))
            if place is not None:
                return _continued(tokens, place, length)
        return []

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a draft of which the first `accepted` tokens were right, and the next one, if any, was not."""
        tried = accepted + (accepted < drafted)
        self.chance += (1 - (1 - _SMOOTHING) ** tried) * (accepted / tried - self.chance)

    def _promising(self, least_chance: float) -> int:
        """Return how many tokens are all accepted with a chance of `least_chance` or more."""
        count, chance = 0, self.chance
        while count < self._length and chance >= least_chance:
            count += 1
            chance *= self.chance
        return count

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams in front of tokens that are new. The last words themselves have no token behind them."""
        for place in range(max(self._indexed, min(_NGRAMS)), len(tokens)):
            for size in _NGRAMS:
                if place >= size:
                    self._followers[tuple(tokens[place - size : place])] = place
        self._indexed = len(tokens)


def _continued(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """Return what follows from `place` on, which repeats if it reaches the end of the tokens."""
    draft = list(tokens[place : place + length])
    period = len(draft)
    return [draft[index % period] for index in range(length)]


@dataclass(frozen=True)
class Speculation:
    """Drafts of up to `length` tokens for each sequence of a batch.

    `row_share` is the time that a further row adds to a step, as a share of the time of a step with one row.
    """

    length: int
    row_share: float

    def least_chance(self, rows: int) -> float:
        """Return the chance above which a further row pays in a step that has `rows` rows already."""
        return self.row_share * rows / (1 + self.row_share * (rows - 1))
