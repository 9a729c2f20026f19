"""Speculative decoding: what drafts tokens, and how many of them pay.

Prompt lookup proposes the tokens that followed the same words earlier in the sequence. `draft_model.py` asks a smaller
model.

A step computes the newest token of a sequence and its draft at once, and keeps the draft as far as it is what the
sampler would have chosen token by token. Each of these tokens is drawn with the noise of its own place in the output
(`gumbel.py`). So sampling too gives exactly the tokens that it gives without drafts, and a draft is accepted with the
probability of its tokens, as in speculative sampling (Leviathan et al., 2023).

Further rows of a step cost time. A token is proposed if its chance of being accepted is higher than the share that a
row has in the time of the step, since otherwise the batch generates fewer tokens per second with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from handlers.rolling_batch import scheduler

if TYPE_CHECKING:
    from handlers.rolling_batch.sampler import SamplingState

_NGRAMS = (3, 2)  # tokens that have to be the same; the longer one first
_FIRST_CHANCE = 0.5  # that the next drafted token is accepted, before anything is known
_SMOOTHING = 0.25  # weight of the newest draft
_RECOVERY = 0.01  # by which the chance returns to the first one with each token, so that drafts are tried again


class Drafter(Protocol):
    """Proposes tokens for the sequences of a batch."""

    def add(self, request_id: str, sampling: SamplingState) -> None:
        """Draft for a request from now on. `sampling` is the state with which its tokens are chosen."""
        ...

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        ...

    def propose(
        self, wanted: Sequence[tuple[scheduler.Sequence, int]], rows: int, room: int
    ) -> Mapping[scheduler.Sequence, list[int]]:
        """Return drafts: for each sequence up to so many tokens, `room` in all.

        The step has `rows` rows already. Sequences of requests that were not added get no draft.
        """
        ...

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Learn from a draft of which the first `accepted` tokens were right, and the next one, if any, was not."""
        ...


class Acceptance:
    """The chance that the next drafted token of a sequence is accepted, learnt from its drafts so far."""

    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a draft; see `Drafter.observe`."""
        tried = accepted + (accepted < drafted)
        self.chance += (1 - (1 - _SMOOTHING) ** tried) * (accepted / tried - self.chance)

    def promising(self, most: int, least_chance: float) -> int:
        """Return how many tokens, `most` at most, are all accepted with a chance of `least_chance` or more."""
        count, chance = 0, self.chance
        while count < most and chance >= least_chance:
            count += 1
            chance *= self.chance
        return count

    def recover(self) -> None:
        """Account for a token without a draft."""
        self.chance += _RECOVERY * (_FIRST_CHANCE - self.chance)


class PromptLookup:
    """The drafts of one sequence: up to `length` tokens that followed the newest occurrence of its last words."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._followers: dict[tuple[int, ...], int] = {}  # where the token behind an n-gram is
        self._indexed = 0  # tokens whose n-grams are in `_followers`
        self.acceptance = Acceptance()

    def propose(self, tokens: Sequence[int], most: int, least_chance: float) -> list[int]:
        """Return a draft of up to `most` tokens; each is accepted with a chance of `least_chance` or more."""
        self._index(tokens)
        length = min(most, self.acceptance.promising(self._length, least_chance))
        if length <= 0:
            self.acceptance.recover()
            return []
        for size in _NGRAMS:
            place = self._followers.get(tuple(tokens[-size:]))
            if place is not None:
                return _continued(tokens, place, length)
        return []

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


class Speculation:
    """Drafts by prompt lookup of up to `length` tokens for each sequence of a batch.

    `row_share` is the time that a further row adds to a step, as a share of the time of a step with one row.
    """

    def __init__(self, length: int, row_share: float) -> None:
        self._length = length
        self._row_share = row_share
        self._lookups: dict[str, PromptLookup] = {}

    def add(self, request_id: str, sampling: SamplingState) -> None:
        self._lookups[request_id] = PromptLookup(self._length)

    def remove(self, request_id: str) -> None:
        self._lookups.pop(request_id, None)

    def propose(
        self, wanted: Sequence[tuple[scheduler.Sequence, int]], rows: int, room: int
    ) -> Mapping[scheduler.Sequence, list[int]]:
        drafts: dict[scheduler.Sequence, list[int]] = {}
        for sequence, most in wanted:
            lookup = self._lookups.get(sequence.request_id)
            if lookup is None or min(most, room) <= 0:
                continue
            tokens = lookup.propose(sequence.tokens, min(most, room), self.least_chance(rows))
            if tokens:
                drafts[sequence] = tokens
                rows += len(tokens)
                room -= len(tokens)
        return drafts

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        self._lookups[request_id].acceptance.observe(drafted, accepted)

    def least_chance(self, rows: int) -> float:
        """Return the chance above which a further row pays in a step that has `rows` rows already."""
        return self._row_share * rows / (1 + self._row_share * (rows - 1))
