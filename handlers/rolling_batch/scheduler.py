"""Which sequences run in the next step: plain data in, plain data out; no tensors, no clock, no I/O.

Iteration-level batching as in Orca (Yu et al., OSDI 2022) with chunked prefill as in Sarathi-Serve (Agrawal et al.,
OSDI 2024): every step decodes one token of each running sequence and, beside that, computes a bounded number of prompt
tokens, so that a long prompt never stalls the streams of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the rolling batch. `tokens` is the prompt followed by the output."""

    request_id: str
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    priority: int = 3
    computed: int = 0  # tokens whose keys and values are in the KV cache
    slot: int = -1
    adapter: Any = None  # what the model runner adds for its rows

    @property
    def reserved(self) -> int:
        """Tokens that the sequence may occupy in the KV cache: the last output token is never written to it."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.prompt_len


@dataclass(slots=True, frozen=True)
class Chunk:
    """Compute `tokens[start:end]` of a prompt in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.prompt_len


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass: one token for each of `decode`, then the tokens of each of `prefill`, in this order."""

    decode: list[Sequence]
    prefill: list[Chunk]


@dataclass(slots=True)
class SchedulerLimits:
    """`kv_tokens` is the capacity of the KV cache, over all slots; the chunk sizes are prompt tokens per step."""

    max_running: int
    kv_tokens: int
    chunk_size: int
    chunk_size_when_idle: int


@dataclass(slots=True)
class Scheduler:
    """First come, first served within a priority; a sequence is admitted once all that it may need is free."""

    limits: SchedulerLimits
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    reserved_tokens: int = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its own and of more urgent priority.

        Raises ValueError where it could never be admitted.
        """
        if sequence.reserved > self.limits.kv_tokens:
            raise ValueError(f"needs {sequence.reserved} tokens of KV cache of {self.limits.kv_tokens} in all")
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority > sequence.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence: finished, aborted or failed. Its share of the KV cache is free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.reserved_tokens -= sequence.reserved
        else:
            self.waiting.remove(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into the batch while there is room; return the newcomers, which need a slot."""
        admitted = []
        while self.waiting and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.reserved_tokens += sequence.reserved
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> StepPlan:
        """Return the next step. It is empty exactly where nothing runs."""
        decode = [sequence for sequence in self.running if sequence.decoding]
        budget = self.limits.chunk_size if decode else self.limits.chunk_size_when_idle
        return StepPlan(decode, list(self._chunks(budget)))

    def _fits(self, sequence: Sequence) -> bool:
        has_slot = len(self.running) < self.limits.max_running
        return has_slot and self.reserved_tokens + sequence.reserved <= self.limits.kv_tokens

    def _chunks(self, budget: int) -> Iterable[Chunk]:
        for sequence in self.running:
            if budget == 0:
                return
            if sequence.computed < sequence.prompt_len:
                end = min(sequence.prompt_len, sequence.computed + budget)
                budget -= end - sequence.computed
                yield Chunk(sequence, sequence.computed, end)


def advance(plan: StepPlan) -> None:
    """Account for a plan that was computed: its tokens are in the KV cache now."""
    for sequence in plan.decode:
        sequence.computed += 1
    for chunk in plan.prefill:
        chunk.sequence.computed = chunk.end
