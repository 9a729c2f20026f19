"""Which waiting sequence is admitted next, and how much memory sequences are expected to need until they end.

How long an output will be is unknown. Reserving max_new_tokens for each sequence would leave most of the KV cache
empty; reserving nothing would fill it with sequences that cannot go on. So a share of what is left, the new-token
ratio, is expected of each sequence. It falls while memory suffices, and rises when a sequence had to be retracted.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Literal

from handlers.rolling_batch.schedule.plan import Sequence

Policy = Literal["lpm", "fcfs"]

# The new-token ratio: the share of the tokens it may still generate that a sequence is expected to. SGLang's numbers.
_RATIO_AT_START = 0.7
_RATIO_AT_END = 0.14  # as a share of the ratio at the start
_RATIO_STEPS = 600  # from the ratio at the start to that at the end
_STEPS_AFTER_RETRACTION = 20  # how long the batch should run without another retraction
_MAX_EXPECTED = 4096  # tokens expected of a sequence at most, which may fill the whole context
_MAX_SORTED = 128  # waiting sequences; with more of them lpm is fcfs, because matching takes longer than it saves


class WaitingQueue:
    """`sequences` wait, by priority, then by arrival. At most `max_running` run beside them."""

    def __init__(self, policy: Policy, max_running: int) -> None:
        self.sequences: list[Sequence] = []
        self._policy = policy
        self._max_overtaken = 2 * max_running
        self._arrivals = 0

    def arrive(self, sequence: Sequence) -> None:
        """Queue a new sequence behind those of the same and of higher priority."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.put(sequence)

    def put(self, sequence: Sequence) -> None:
        """Queue a sequence by its priority and arrival."""
        bisect.insort(self.sequences, sequence, key=lambda entry: (entry.priority, entry.arrival))

    def leave(self, admitted: SequenceOf[Sequence]) -> None:
        """Take out the sequences that run now."""
        if not admitted:
            return
        started = {id(sequence) for sequence in admitted}
        self.sequences[:] = [sequence for sequence in self.sequences if id(sequence) not in started]
        for sequence in self.sequences:
            sequence.overtaken += sum(later.arrival > sequence.arrival for later in admitted)

    def in_order(self, matched: Callable[[Sequence], int]) -> list[Sequence]:
        """Return the sequences, the next one first; `matched` counts the tokens of one in the KV cache."""
        if self._policy == "fcfs" or len(self.sequences) > _MAX_SORTED:
            return list(self.sequences)
        found = {id(sequence): matched(sequence) for sequence in self.sequences}
        return sorted(
            self.sequences,
            key=lambda entry: (entry.priority, not self.is_overdue(entry), -found[id(entry)], entry.arrival),
        )

    def is_overdue(self, sequence: Sequence) -> bool:
        """Whether so many others have overtaken the sequence that it comes first: lpm alone could starve it."""
        return sequence.overtaken >= self._max_overtaken


class Expectation:
    """The new-token ratio, and what follows from it."""

    def __init__(self, conservativeness: float) -> None:
        self._start = min(_RATIO_AT_START * conservativeness, 1.0)
        self.ratio = self._start

    def peak(self, sequences: Iterable[Sequence], held: int) -> float:
        """Return how many tokens of memory are in use when most are: `held`, and those of the sequences.

        All grow at the same rate, and each gives its memory back when it ends. So memory is highest just before one of
        them ends: at that time all with as much or more left to generate have grown by this rest.
        """
        highest = 0.0
        for count, (left, tokens) in enumerate(sorted(map(self._expected, sequences), reverse=True), start=1):
            held += tokens
            highest = max(highest, held + left * count)
        return highest

    def _expected(self, sequence: Sequence) -> tuple[float, int]:
        """Return the tokens that the sequence is still expected to generate, and its tokens so far."""
        left = min(sequence.max_new_tokens - sequence.generated, _MAX_EXPECTED)
        return left * self.ratio, len(sequence.tokens)

    def retracted(self, running: SequenceOf[Sequence]) -> None:
        """Raise the ratio after memory ran short; `running` are the sequences that still run."""
        done = sum(sequence.generated for sequence in running) + _STEPS_AFTER_RETRACTION * len(running)
        self.ratio = min(1.0, done / sum(sequence.max_new_tokens for sequence in running))

    def decay(self, is_idle: bool) -> None:
        """Lower the ratio while memory suffices; reset it if nothing runs."""
        end = self._start * _RATIO_AT_END
        if is_idle:
            self.ratio = self._start
        elif self.ratio > end:
            self.ratio = max(end, self.ratio - (self._start - end) / _RATIO_STEPS)
