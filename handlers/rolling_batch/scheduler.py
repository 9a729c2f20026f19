"""Which sequences run in the next step: plain data in, plain data out; no tensors, no clock, no I/O.

Iteration-level batching as in Orca (Yu et al., OSDI 2022) with chunked prefill as in Sarathi-Serve (Agrawal et al.,
OSDI 2024): every step decodes one token of each running sequence and, beside that, computes a bounded number of prompt
tokens, so that a long prompt never stalls the streams of the others. Admission, retraction and the policies mean what
SGLang's of the same names mean (Zheng et al., 2024).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from handlers.rolling_batch.slots import Copy, Match, SlotTable, Trim

Policy = Literal["lpm", "fcfs"]

_RATIO_AT_START = 0.7  # of the tokens that a sequence may still generate, those it is expected to; SGLang's numbers
_RATIO_AT_END = 0.14  # of the ratio at the start
_RATIO_STEPS = 600  # from the one to the other
_STEPS_AFTER_RETRACTION = 20  # that the batch should run without another one
_MOST_EXPECTED = 4096  # tokens; more are not reserved for a sequence that may fill the context
_WORTH_WAITING = 16  # tokens that a running sequence is about to compute for one that waits
_MOST_SORTED = 128  # waiting sequences; with more of them lpm is fcfs, because matching would take longer than it saves


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the rolling batch. `tokens` is the prompt followed by the output."""

    request_id: str
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    priority: int = 3
    adapter: Any = None  # what the model runner adds for its rows; keys and values depend on it
    may_reuse_prefix: bool = True  # whether it may continue from keys and values that other sequences computed
    shares_prefix: bool = True  # whether other sequences may continue from its keys and values
    computed: int = 0  # tokens whose keys and values are in the KV cache
    slot: int = -1
    cached: int = -1  # prompt tokens that were not computed for it; -1 before it first ran
    arrival: int = -1
    overtaken: int = 0  # later ones that were admitted before it

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that the sequence may occupy in the KV cache: the last output token is never written to it."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.computed == len(self.tokens) - 1


@dataclass(slots=True, frozen=True)
class Chunk:
    """Compute `tokens[start:end]` of a sequence in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        """Whether the next token follows: of a sequence that was retracted, its output so far counts as prompt."""
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True, frozen=True)
class Retraction:
    """Running sequences went back to the queue because memory ran short; the ratios are those before and after."""

    sequences: list[Sequence]
    ratio_before: float
    ratio_after: float


@dataclass(slots=True, frozen=True)
class StepPlan:
    """Do `trims`, then `copies`, then one forward pass: a token of each of `decode`, then the tokens of `prefill`.

    `started` are the sequences that run for the first time; what is left tells why the plan is what it is.
    """

    decode: list[Sequence]
    prefill: list[Chunk]
    trims: list[Trim] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    retraction: Retraction | None = None


@dataclass(slots=True)
class SchedulerLimits:
    """`kv_tokens` is the capacity of the KV cache, over all `slots`; the chunk sizes are prompt tokens per step.

    More slots than sequences that run at once (`max_running`) keep what others may reuse.
    """

    max_running: int
    kv_tokens: int
    chunk_size: int
    chunk_size_when_idle: int
    slots: int = 0  # as many as run at once, if they are more
    policy: Policy = "lpm"
    conservativeness: float = 1.0


class Scheduler:
    """Decides what runs; owns the slots.

    Within a priority the longest match comes first (lpm) or who came first (fcfs). A sequence is admitted once its
    prompt and the part of its output that is to be expected fit; where more is generated than was expected, the
    sequence that came last goes back to the queue. The one that came first is never retracted, so each one ends.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.slots = SlotTable(max(limits.slots, limits.max_running), limits.kv_tokens)
        self.waiting: list[Sequence] = []  # by priority, then by arrival
        self.running: list[Sequence] = []
        self._arrivals = 0
        self._start_ratio = min(_RATIO_AT_START * limits.conservativeness, 1.0)
        self.new_token_ratio = self._start_ratio

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its own and of more urgent priority.

        Raises ValueError where it could never be admitted.
        """
        if sequence.max_kv_tokens > self.limits.kv_tokens:
            raise ValueError(f"needs {sequence.max_kv_tokens} tokens of KV cache of {self.limits.kv_tokens} in all")
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._wait(sequence)

    def remove(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Forget a sequence: finished, aborted or failed. Its slot is free at once.

        What was computed of it stays for others to reuse, unless it is not `sound`.
        """
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence, sound)

    def forget(self, adapter: Any) -> None:
        """Keep nothing that was computed with an adapter beyond the sequences that run with it."""
        self.slots.forget(adapter)
        for sequence in (*self.running, *self.waiting):
            if sequence.adapter is adapter:
                sequence.shares_prefix = False

    def plan(self) -> StepPlan:
        """Admit what fits and return the next step. It is empty exactly where nothing runs."""
        retraction = self._retract()
        started = [] if retraction else self._admit()
        decode = [sequence for sequence in self.running if sequence.decoding]
        budget = self.limits.chunk_size if decode else self.limits.chunk_size_when_idle
        room = self.limits.kv_tokens - self._running_tokens() - len(decode)
        prefill = list(self._chunks(min(budget, room)))
        for sequence in decode:
            self.slots.reserve(sequence.slot, sequence.computed + 1)
        for chunk in prefill:
            self.slots.reserve(chunk.sequence.slot, chunk.end)
        self._decay_ratio()
        return StepPlan(decode, prefill, *self.slots.step_planned(), started, retraction)

    def advance(self, plan: StepPlan) -> None:
        """Account for a plan that was computed: its tokens are in the KV cache now."""
        for sequence in plan.decode:
            self._computed(sequence, sequence.computed + 1)
        for chunk in plan.prefill:
            self._computed(chunk.sequence, chunk.end)

    def _computed(self, sequence: Sequence, tokens: int) -> None:
        sequence.computed = tokens
        self.slots.computed(sequence.slot, tokens)

    # --- the queue ---

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda entry: (entry.priority, entry.arrival))

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences into the batch while there is room; return those that never ran before."""
        admitted, fresh = [], []
        for sequence in self._in_order() if self._has_place() else []:
            match = self._match(sequence)
            if match.coming - match.tokens >= _WORTH_WAITING and not self._overdue(sequence):
                continue  # a running sequence is computing what it would compute as well
            if not self._has_place() or not self._fits(sequence) or not self._start(sequence, match):
                break
            admitted.append(sequence)
            if sequence.cached < 0:
                sequence.cached = sequence.computed
                fresh.append(sequence)
        if admitted:
            started = {id(sequence) for sequence in admitted}
            self.waiting = [sequence for sequence in self.waiting if id(sequence) not in started]
            for sequence in self.waiting:
                sequence.overtaken += sum(later.arrival > sequence.arrival for later in admitted)
        return fresh

    def _in_order(self) -> list[Sequence]:
        if self.limits.policy == "fcfs" or len(self.waiting) > _MOST_SORTED:
            return list(self.waiting)
        found = {id(sequence): self._match(sequence).tokens for sequence in self.waiting}
        return sorted(
            self.waiting,
            key=lambda entry: (entry.priority, not self._overdue(entry), -found[id(entry)], entry.arrival),
        )

    def _overdue(self, sequence: Sequence) -> bool:
        """Whether so many others overtook the sequence that it is its turn whatever it shares."""
        return sequence.overtaken >= 2 * self.limits.max_running

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.may_reuse_prefix:
            return Match(-1, 0, 0)
        return self.slots.find(sequence.adapter, sequence.tokens)

    def _start(self, sequence: Sequence, match: Match) -> bool:
        needed = sum(len(entry.tokens) for entry in self.running)
        claimed = self.slots.claim(sequence.adapter, sequence.tokens, match, self.limits.kv_tokens - needed)
        if claimed is None:
            return False
        sequence.slot, sequence.computed = claimed
        self.running.append(sequence)
        return True

    # --- memory ---

    def _has_place(self) -> bool:
        return len(self.running) < self.limits.max_running

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the memory holds what all that run, and this one, are expected to need.

        A sequence gives its memory back when it ends: the most is needed just before one of them does.
        """
        if not self.running:
            return True
        held = 0
        entries = sorted(map(self._expected, (*self.running, sequence)), reverse=True)
        for count, (left, tokens) in enumerate(entries, start=1):
            held += tokens
            if held + left * count > self.limits.kv_tokens:
                return False
        return True

    def _expected(self, sequence: Sequence) -> tuple[float, int]:
        """Tokens that the sequence is expected to generate yet, and those it needs memory for now."""
        left = min(sequence.max_new_tokens - sequence.generated, _MOST_EXPECTED)
        return left * self.new_token_ratio, len(sequence.tokens)

    def _running_tokens(self) -> int:
        return sum(sequence.computed for sequence in self.running)

    def _retract(self) -> Retraction | None:
        """Send running sequences back to the queue until the others can go on."""
        retracted: list[Sequence] = []
        while self.running:
            wanted = max(sum(sequence.decoding for sequence in self.running), 1)
            if self._running_tokens() + wanted <= self.limits.kv_tokens:
                break
            last = max(self.running, key=lambda entry: (entry.priority, entry.arrival))
            self.running.remove(last)
            self._vacate(last, sound=True)
            self._wait(last)
            retracted.append(last)
        if not retracted:
            return None
        before = self.new_token_ratio
        done = sum(sequence.generated for sequence in self.running) + _STEPS_AFTER_RETRACTION * len(self.running)
        self.new_token_ratio = min(1.0, done / sum(sequence.max_new_tokens for sequence in self.running))
        return Retraction(retracted, before, self.new_token_ratio)

    def _vacate(self, sequence: Sequence, sound: bool) -> None:
        if sound and sequence.shares_prefix:
            self.slots.release(sequence.slot, sequence.adapter, sequence.tokens)
        else:
            self.slots.discard(sequence.slot)
        sequence.slot, sequence.computed = -1, 0

    def _decay_ratio(self) -> None:
        """Expect less while memory suffices; start anew where nothing runs."""
        least = self._start_ratio * _RATIO_AT_END
        if not self.running:
            self.new_token_ratio = self._start_ratio
        elif self.new_token_ratio > least:
            self.new_token_ratio = max(least, self.new_token_ratio - (self._start_ratio - least) / _RATIO_STEPS)

    def _chunks(self, budget: int) -> Iterable[Chunk]:
        for sequence in self.running:
            if budget <= 0:
                return
            if not sequence.decoding:
                end = min(len(sequence.tokens), sequence.computed + budget)
                budget -= end - sequence.computed
                yield Chunk(sequence, sequence.computed, end)
