"""Speculative decoding: what drafts tokens, and how many of them pay.

Prompt lookup proposes the tokens that followed the same words earlier in the sequence. `draft_model.py` asks a smaller
model.

A step computes the newest token of a sequence and its draft at once, and keeps the draft as far as it is what the
sampler would have chosen token by token. Each of these tokens is drawn with the noise of its own place in the output
(`gumbel.py`). So sampling too gives exactly the tokens that it gives without drafts, and a draft is accepted with the
probability of its tokens, as in speculative sampling (Leviathan et al., 2023).

Further rows of a step cost time (`step_times.py`). A step gets the drafts with the most expected tokens per second, and
none if they are not clearly better than no drafts. Both follow from measurements: a batch whose kernels are busy gets
none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from handlers.rolling_batch.schedule import plan
from handlers.rolling_batch.speculation.step_times import StepTimes

if TYPE_CHECKING:
    from handlers.rolling_batch.sampling.state import SamplingState

_NGRAMS = (3, 2)  # tokens that have to be the same; the longer one first
_FIRST_CHANCE = 0.5  # that the next drafted token is accepted, before anything is known
_SMOOTHING = 0.25  # weight of the newest draft
_RECOVERY = 0.01  # the chance returns to the first one by this with each token, for drafts to be tried again
_MIN_GAIN = 1.05  # times the tokens per second without drafts
# The worth of an earlier token in a large batch, relative to one for a single sequence. A sequence that ends sooner
# saves a row of later steps, not the steps, which the others still need.
_WORTH_IN_BATCH = 0.5


class Drafter(Protocol):
    """Proposes tokens for the sequences of a batch."""

    def add(self, number: int, sampling: SamplingState) -> None:
        """Draft for the sequence of that number from now on. Its tokens are chosen with the state `sampling`."""
        ...

    def remove(self, number: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        ...

    def propose(
        self, wanted: Sequence[tuple[plan.Sequence, int]], rows: int, room: int
    ) -> Mapping[plan.Sequence, list[int]]:
        """Return drafts: for each sequence up to so many tokens, `room` in all.

        The step has `rows` rows already. Sequences that were not added get no draft.
        """
        ...

    def observe(self, number: int, drafted: int, accepted: int) -> None:
        """Learn from a draft: its first `accepted` tokens were right, and the next one, if any, was not."""
        ...

    def timed(self, rows: int, seconds: float) -> None:
        """Learn how long a step took that had `rows` rows, drafts among them, and no prompts."""
        ...


class Acceptance:
    """The chance that the next drafted token of a sequence is accepted, learnt from its drafts so far."""

    def __init__(self) -> None:
        self.chance = _FIRST_CHANCE

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a draft; see `Drafter.observe`."""
        tried = accepted + (accepted < drafted)
        self.chance += (1 - (1 - _SMOOTHING) ** tried) * (accepted / tried - self.chance)

    def promising_length(self, most: int, min_chance: float) -> int:
        """Return how many tokens, `most` at most, are all accepted with a chance of `min_chance` or more."""
        count, chance = 0, self.chance
        while count < most and chance >= min_chance:
            count += 1
            chance *= self.chance
        return count

    def recover(self) -> None:
        """Account for a token without a draft."""
        self.chance += _RECOVERY * (_FIRST_CHANCE - self.chance)


class PromptLookup:
    """The drafts of one sequence: up to `length` tokens that followed the newest occurrence of its last words.

    The tokens that come show whether a draft was right, also if it was not computed. So a sequence that begins to
    repeat itself is noticed without any cost.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._followers: dict[tuple[int, ...], int] = {}  # where the token behind an n-gram is
        self._indexed = 0  # tokens whose n-grams are in `_followers`
        self._draft: list[int] = []  # what should follow the first `_indexed` tokens
        self.acceptance = Acceptance()

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Return a draft, which is empty if the last words are new."""
        self._compare(tokens[self._indexed :])
        self._index(tokens)
        self._draft = []
        for size in _NGRAMS:
            place = self._followers.get(tuple(tokens[-size:]))
            if place is not None:
                self._draft = _continuation(tokens, place, self._length)
                break
        return self._draft

    def _compare(self, come: Sequence[int]) -> None:
        """Learn from the tokens that have come since the last draft."""
        pairs = list(zip(self._draft, come, strict=False))
        right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if pairs:
            self.acceptance.observe(len(pairs), right)

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams in front of tokens that are new. The last words themselves have no token behind them."""
        for place in range(max(self._indexed, min(_NGRAMS)), len(tokens)):
            for size in _NGRAMS:
                if place >= size:
                    self._followers[tuple(tokens[place - size : place])] = place
        self._indexed = len(tokens)


def _continuation(tokens: Sequence[int], place: int, length: int) -> list[int]:
    """Return the tokens from `place` on, repeated from the end of the tokens."""
    draft = list(tokens[place : place + length])
    period = len(draft)
    return [draft[index % period] for index in range(length)]


class Speculation:
    """Drafts by prompt lookup of up to `length` tokens for each sequence of a batch, if it pays by `times`."""

    def __init__(self, length: int, times: StepTimes) -> None:
        self._length = length
        self._times = times
        self._lookups: dict[int, PromptLookup] = {}  # by the numbers of sequences

    def add(self, number: int, sampling: SamplingState) -> None:
        self._lookups[number] = PromptLookup(self._length)

    def remove(self, number: int) -> None:
        self._lookups.pop(number, None)

    def propose(
        self, wanted: Sequence[tuple[plan.Sequence, int]], rows: int, room: int
    ) -> Mapping[plan.Sequence, list[int]]:
        found: list[tuple[float, plan.Sequence, list[int]]] = []  # a draft up to one of its tokens, and its chance
        for sequence, most in wanted:
            lookup = self._lookups.get(sequence.number)
            if lookup is None:
                continue
            draft, chance = lookup.propose(sequence.tokens)[: max(most, 0)], lookup.acceptance.chance
            found += [(chance**size, sequence, draft[:size]) for size in range(1, len(draft) + 1)]
        found = sorted(found, key=lambda entry: entry[0], reverse=True)[: max(room, 0)]
        count = worthwhile_length([chance for chance, *_ in found], rows, self._times)
        return {sequence: draft for _, sequence, draft in found[:count]}  # the longest one of each sequence comes last

    def observe(self, number: int, drafted: int, accepted: int) -> None:
        """Learn nothing: the next draft compares the last one with what has come."""

    def timed(self, rows: int, seconds: float) -> None:
        self._times.observe(rows, seconds)


def worthwhile_length(chances: Sequence[float], rows: int, times: StepTimes) -> int:
    """Return how many drafted tokens make a step of `rows` rows, one per sequence, generate the most per second.

    `chances` has the chances that they are accepted, the highest first. There is none if a step without drafts was not
    measured lately, so that there is something to compare with.
    """
    if not chances or not times.knows(rows):
        return 0
    worth = 1 - (1 - _WORTH_IN_BATCH) * (1 - 1 / rows)
    best, count, tokens = _MIN_GAIN * rows / times(rows), 0, float(rows)
    for drafted, chance in enumerate(chances, start=1):
        tokens += worth * chance
        rate = tokens / times(rows + drafted)
        if rate > best:
            best, count = rate, drafted
    return count
