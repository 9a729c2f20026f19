"""Which sequences run in the next step: plain data in, plain data out; no tensors, no clock, no I/O.

Iteration-level batching as in Orca (Yu et al., OSDI 2022) with chunked prefill as in Sarathi-Serve (Agrawal et al.,
OSDI 2024): every step decodes one token of each running sequence, and computes a bounded number of prompt tokens as
well, so that a long prompt never stalls the streams of the others. Admission, retraction and the policies mean what
SGLang's of the same names mean (Zheng et al., 2024).

When memory runs short, the sequence that came last is retracted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handlers.rolling_batch.schedule.admission import Expectation, Policy, WaitingQueue
from handlers.rolling_batch.schedule.frequencies import FrequencyBorder
from handlers.rolling_batch.schedule.page_table import PageStep, PageTable
from handlers.rolling_batch.schedule.plan import Chunk, Draft, Retraction, Sequence, StepPlan
from handlers.rolling_batch.schedule.prefix_tree import EVERY
from handlers.rolling_batch.schedule.prompt_chunks import PromptChunks, min_chunk
from handlers.rolling_batch.schedule.slots import Match, SlotTable
from handlers.rolling_batch.schedule.state_table import StateStep, StateTable

_WORTH_WAITING = 16  # tokens; if a running sequence is about to compute so many of another's prefix, that one waits


@dataclass(slots=True)
class SchedulerLimits:
    """`kv_tokens` is the capacity of the KV cache over all `slots`; the chunk sizes count prompt tokens per step.

    Slots beyond `max_running` keep finished sequences whose prefix others may reuse. If `page` is not 0, slots have no
    memory of their own: the KV cache has pages of so many tokens.

    `prompt_bucket` is for graphs that compute a prompt from its first token only: the most prompt tokens of a graph.
    Further tokens are computed one per step, and no prefix is reused.

    `state_rows`: how many states of recurrent layers there is memory for, 0 if the model has none.
    """

    max_running: int
    kv_tokens: int
    chunk_size: int
    chunk_size_when_idle: int
    slots: int = 0  # at least `max_running` in any case
    policy: Policy = "lpm"
    conservativeness: float = 1.0
    prompt_bucket: int | None = None
    state_rows: int = 0  # at least `max_running` if there are any
    page: int = 0


class Scheduler:
    """Decides what runs; owns the slots.

    Within a priority, the sequence with the longest match in the KV cache comes first (lpm), or the one that came first
    (fcfs). A sequence is admitted once its prompt and its expected output fit. If more is generated than expected, the
    sequence that came last goes back to the queue. The one that came first is never retracted, so every one ends.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        slots = max(limits.slots, limits.max_running)
        states = StateTable(max(limits.state_rows, limits.max_running)) if limits.state_rows else None
        self.slots: SlotTable | PageTable = (
            PageTable(slots, limits.kv_tokens, limits.page, states)
            if limits.page
            else SlotTable(slots, limits.kv_tokens, states)
        )
        self.border: FrequencyBorder | None = None  # None: rotary embeddings are the same for every length
        self.queue = WaitingQueue(limits.policy, limits.max_running)
        self.waiting = self.queue.sequences
        self.running: list[Sequence] = []
        self.expectation = Expectation(limits.conservativeness)
        self._chunks = PromptChunks(limits.chunk_size, limits.chunk_size_when_idle, limits.prompt_bucket, self.slots)

    @property
    def goes_on(self) -> bool:
        """Whether a running sequence has further tokens to compute, whatever the unknown ones are."""
        return any(not sequence.ends for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of the same and of higher priority.

        Raises ValueError if it could never be admitted.
        """
        if sequence.max_kv_tokens > self.slots.kv_tokens:
            raise ValueError(f"needs {sequence.max_kv_tokens} tokens of KV cache, which holds {self.slots.kv_tokens}")
        sequence.regime = 0 if self.border is None else self.border.regime(sequence.prompt_len)
        self.queue.arrive(sequence)

    def remove(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Forget a sequence that has finished, was aborted or has failed. Its slot is free at once.

        Its keys and values stay for others to reuse if they are `sound`.
        """
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence, sound)

    def forget(self, adapter: Any) -> None:
        """Keep nothing that was computed with an adapter, or with EVERY, once its running sequences have ended."""
        self.slots.forget(adapter)
        for sequence in (*self.running, *self.waiting):
            if adapter is EVERY or sequence.adapter is adapter:
                sequence.shares_prefix = False

    def plan(self, draft: Draft | None = None) -> StepPlan:
        """Admit waiting sequences and return the next step, which is empty only if nothing runs."""
        if self.border is not None:
            self._cross(self.border)
        retraction = self._retract()
        started = [] if retraction else self._admit()  # a sequence that was just retracted must not come back at once
        decode = [sequence for sequence in self.running if sequence.decoding and not sequence.ends]
        # Decoding sequences get their memory first; prompts take what is left in this step.
        room = self.slots.room
        for sequence in decode:
            _, room = self.slots.fit(sequence.slot, sequence.computed + 1, room)
        prefill = list(self._chunks.plan(self.running, len(decode), room))
        drafts = self._drafts(decode, room, draft) if draft is not None and not prefill else {}
        for sequence in decode:
            self.slots.reserve(sequence.slot, sequence.computed + 1 + len(drafts.get(sequence, ())))
        for chunk in prefill:
            self.slots.reserve(chunk.sequence.slot, chunk.end)
        self.expectation.decay(is_idle=not self.running)
        states = self._states_planned(decode, prefill)
        return StepPlan(
            decode,
            prefill,
            started=started,
            retraction=retraction,
            drafts=drafts,
            states=states,
            **_memory_planned(self.slots),
        )

    def _cross(self, border: FrequencyBorder) -> None:
        """Let the sequences that have crossed the border compute all their keys anew."""
        for sequence in (*self.running, *self.waiting):
            if border.crossed(sequence):
                sequence.regime = border.regime(len(sequence.tokens))
                sequence.computed = 0
                if sequence.slot >= 0:
                    assert isinstance(self.slots, SlotTable), "a model with a border has slots, not pages"
                    self.slots.begin_anew(sequence.slot, sequence.adapter, sequence.keys)

    def _states_planned(self, decode: list[Sequence], prefill: list[Chunk]) -> StateStep | None:
        table = self.slots.states
        if table is None:
            return None
        for chunk in prefill:
            table.chunk_planned(chunk.sequence.slot, chunk.end, chunk.completes_prompt)
        return table.step_planned([sequence.slot for sequence in (*decode, *(chunk.sequence for chunk in prefill))])

    def advance(self, plan: StepPlan) -> None:
        """Account for a plan that has been computed: its tokens are in the KV cache."""
        for sequence in plan.decode:
            self._set_computed(sequence, sequence.computed + 1)
        for chunk in plan.prefill:
            self._set_computed(chunk.sequence, chunk.end)

    def draft_accepted(self, sequence: Sequence) -> None:
        """Account for a drafted token that is the newest one of its sequence: it is in the KV cache already."""
        self._set_computed(sequence, sequence.computed + 1)

    def _drafts(self, decode: list[Sequence], room: int, draft: Draft) -> Mapping[Sequence, list[int]]:
        """Return the drafts of the decoding sequences, in the memory that is left."""
        # A step generates one token more than it accepts drafted ones.
        wanted = [(sequence, _may_draft(sequence, self.border)) for sequence in decode]
        return draft(wanted, len(decode), self.slots.draft_tokens(room, len(decode)))

    def _set_computed(self, sequence: Sequence, tokens: int) -> None:
        sequence.computed = tokens
        self.slots.set_computed(sequence.slot, tokens)

    # --- the queue ---

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences into the batch while there is room; return the new ones among them."""
        admitted: list[Sequence] = []
        try:
            for sequence in self.queue.in_order(lambda entry: self._match(entry).tokens) if self._has_place() else []:
                match = self._match(sequence)
                if match.coming - match.tokens >= _WORTH_WAITING and not self.queue.is_overdue(sequence):
                    self.slots.follow(match)
                    continue  # a running sequence is about to compute the same prefix, to be reused then
                if not self._has_place() or not self._fits(sequence, match) or not self._start(sequence, match):
                    break
                admitted.append(sequence)
        finally:  # even if a later sequence fails: no sequence both waits and runs
            self.queue.leave(admitted)
        fresh = [sequence for sequence in admitted if sequence.cached < 0]
        for sequence in fresh:
            sequence.cached = sequence.computed
        return fresh

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.may_reuse_prefix or self.limits.prompt_bucket is not None:
            return Match(-1, 0, 0)
        return self.slots.find(sequence.adapter, sequence.keys)

    def _start(self, sequence: Sequence, match: Match) -> bool:
        needed = self.slots.needed(len(entry.tokens) for entry in self.running)
        claimed = self.slots.claim(sequence.adapter, sequence.keys, match, self.slots.kv_tokens - needed)
        if claimed is None:
            return False
        sequence.slot, sequence.computed = claimed
        self.running.append(sequence)
        return True

    # --- memory ---

    def _has_place(self) -> bool:
        return len(self.running) < self.limits.max_running

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether the KV cache holds what the running sequences and this one are expected to need at any time."""
        if not self.running:
            return True
        lengths = [len(entry.tokens) for entry in self.running]
        held = self.slots.needed(lengths) - sum(lengths) - self.slots.shared(match)
        return self.expectation.peak((*self.running, sequence), held) <= self.slots.kv_tokens

    def _can_go_on(self) -> bool:
        """Whether every sequence that decodes has memory for its next token, or some prompt has if none decodes."""
        room = self.slots.room
        going = [sequence for sequence in self.running if not sequence.ends]
        decode = [sequence for sequence in going if sequence.decoding]
        if decode and room >= len(decode):  # each takes a token or a page at most
            return True
        for sequence in decode:
            end, room = self.slots.fit(sequence.slot, sequence.computed + 1, room)
            if end <= sequence.computed:
                return False
        return bool(decode or not going) or any(
            self.slots.fit(each.slot, each.computed + min_chunk(each), room)[0] == each.computed + min_chunk(each)
            for each in going
        )

    def _retract(self) -> Retraction | None:
        """Send running sequences back to the queue until the others can go on: of the lowest priority, the newest."""
        retracted: list[Sequence] = []
        while self.running and not self._can_go_on():
            last = max(self.running, key=lambda entry: (entry.priority, entry.arrival))
            self.running.remove(last)
            self._vacate(last, sound=True)
            self.queue.put(last)
            retracted.append(last)
        if not retracted:
            return None
        before = self.expectation.ratio
        self.expectation.retracted(self.running)
        return Retraction(retracted, before, self.expectation.ratio)

    def _vacate(self, sequence: Sequence, sound: bool) -> None:
        if sound and sequence.shares_prefix:
            self.slots.release(sequence.slot, sequence.adapter, sequence.keys)
        else:
            self.slots.discard(sequence.slot)
        sequence.slot, sequence.computed = -1, 0


def _may_draft(sequence: Sequence, border: FrequencyBorder | None) -> int:
    """Return how many tokens may follow the next one of a sequence in the same step: none beyond a border."""
    left = sequence.max_new_tokens - sequence.generated - 1
    if border is None or sequence.regime or not border.recomputes:
        return left
    return max(0, min(left, border.length - len(sequence.tokens)))


def _memory_planned(slots: SlotTable | PageTable) -> dict[str, Any]:
    """Return what the planned step has to do before it computes, by the names of the plan's fields."""
    planned = slots.step_planned()
    if isinstance(planned, PageStep):
        return {"pages": planned}
    trims, copies = planned
    return {"trims": trims, "copies": copies}
