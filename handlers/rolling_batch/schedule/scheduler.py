"""Which sequences run in the next step: plain data in, plain data out; no tensors, no clock, no I/O.

Iteration-level batching as in Orca (Yu et al., OSDI 2022) with chunked prefill as in Sarathi-Serve (Agrawal et al.,
OSDI 2024): every step decodes one token of each running sequence, and computes a bounded number of prompt tokens as
well, so that a long prompt never stalls the streams of the others. Admission, retraction and the policies mean what
SGLang's of the same names mean (Zheng et al., 2024).

How long an output will be is unknown. Reserving max_new_tokens for each sequence would leave most of the KV cache
empty; reserving nothing would fill it with sequences that cannot go on. So a share of what is left, the new-token
ratio, is expected of each sequence. It falls while memory suffices, and when it does not, the sequence that came last
is retracted and the ratio rises.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from handlers.rolling_batch.schedule.frequencies import FrequencyBorder
from handlers.rolling_batch.schedule.images import PromptImages
from handlers.rolling_batch.schedule.page_table import PageStep, PageTable
from handlers.rolling_batch.schedule.slots import Match, SlotCopy, SlotTable, SlotTrim
from handlers.rolling_batch.schedule.state_table import StateStep, StateTable

Policy = Literal["lpm", "fcfs"]

# The new-token ratio: the share of the tokens it may still generate that a sequence is expected to. SGLang's numbers.
_RATIO_AT_START = 0.7
_RATIO_AT_END = 0.14  # as a share of the ratio at the start
_RATIO_STEPS = 600  # from the ratio at the start to that at the end
_STEPS_AFTER_RETRACTION = 20  # how long the batch should run without another retraction
_MAX_EXPECTED = 4096  # tokens expected of a sequence at most, which may fill the whole context
_WORTH_WAITING = 16  # tokens; if a running sequence is about to compute so many of another's prefix, that one waits
_MAX_SORTED = 128  # waiting sequences; with more of them lpm is fcfs, because matching takes longer than it saves


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the rolling batch. `tokens` is the prompt, followed by the output.

    The first `known` tokens are known. What stands for the others, whose step was computed and not read yet, is up to
    the engine.

    `number` is the engine's own. What clients call their requests tells no sequences apart.
    """

    number: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    priority: int = 3
    adapter: Any = None  # its LoRA weights, which keys and values depend on
    may_reuse_prefix: bool = True  # whether it may continue from keys and values that other sequences computed
    shares_prefix: bool = True  # whether other sequences may continue from its keys and values
    computed: int = 0  # tokens whose keys and values are in the KV cache
    slot: int = -1
    cached: int = -1  # prompt tokens that it took over from other sequences; -1 before it first ran
    arrival: int = -1
    overtaken: int = 0  # sequences that came later and were admitted before it
    images: PromptImages | None = None  # of the prompt
    regime: int = 0  # of its rotary embeddings, which keys depend on; see FrequencyBorder
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.known = len(self.tokens)

    @property
    def keys(self) -> list[int]:
        """What identifies its tokens in the prefix tree: the token ids, but for images and other frequencies."""
        keys = self.tokens if self.images is None else self.images.keys_of(self.tokens)
        return keys if not self.regime else [keys[0] - (self.regime << 40), *keys[1:]]

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that the sequence may have in the KV cache at most: its last output token is never written."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.computed == len(self.tokens) - 1

    @property
    def ends(self) -> bool:
        """Whether its last token was computed, and only has to become known."""
        return len(self.tokens) - self.prompt_len >= self.max_new_tokens

    @property
    def is_begun(self) -> bool:
        """Whether it runs, or waits for a token of the time when it ran."""
        return self.slot >= 0 or self.known < len(self.tokens)

    def append(self, unknown: int) -> None:
        """Add a token that is not known yet; `unknown` stands for it."""
        self.tokens.append(unknown)

    def settle(self, token: int) -> None:
        """Put a token in place of the first one that is unknown."""
        self.tokens[self.known] = token
        self.known += 1

    def drop_unknown(self) -> None:
        """Drop what was computed behind the last token. Keys and values of that one may stay."""
        del self.tokens[self.known :]


@dataclass(slots=True, frozen=True)
class Chunk:
    """Compute `tokens[start:end]` of a sequence in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes_prompt(self) -> bool:
        """Whether an output token follows. If the sequence was retracted, its output so far counts as prompt."""
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True, frozen=True)
class Retraction:
    """Running sequences that went back to the queue because memory ran short, and the new-token ratios around it."""

    sequences: list[Sequence]
    ratio_before: float
    ratio_after: float


@dataclass(slots=True, frozen=True)
class StepPlan:
    """Do `trims`, then `copies`, then what `pages` has; then one forward pass.

    It has a token of each of `decode`, then the tokens of `prefill`.

    `drafts` has the tokens that may follow some of `decode`, and are computed behind these sequences' own token.
    `started` are the sequences that run for the first time. It and `retraction` are for the statistics. `states` has
    what is done with the states of recurrent layers, if there are such.
    """

    decode: list[Sequence]
    prefill: list[Chunk]
    trims: list[SlotTrim] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    retraction: Retraction | None = None
    drafts: Mapping[Sequence, list[int]] = field(default_factory=dict)
    states: StateStep | None = None
    pages: PageStep = field(default_factory=PageStep)


Draft = Callable[[list[tuple[Sequence, int]], int, int], Mapping[Sequence, list[int]]]
"""Proposes tokens for sequences, at most so many for each; see `speculation.Drafter.propose`."""


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
            PageTable(slots, limits.kv_tokens, limits.page)
            if limits.page
            else SlotTable(slots, limits.kv_tokens, states)
        )
        self.border: FrequencyBorder | None = None  # None: rotary embeddings are the same for every length
        self.waiting: list[Sequence] = []  # by priority, then by arrival
        self.running: list[Sequence] = []
        self._arrivals = 0
        self._start_ratio = min(_RATIO_AT_START * limits.conservativeness, 1.0)
        self.new_token_ratio = self._start_ratio

    @property
    def goes_on(self) -> bool:
        """Whether a running sequence has further tokens to compute, whatever those are that are not known yet."""
        return any(not sequence.ends for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of the same and of higher priority.

        Raises ValueError if it could never be admitted.
        """
        if sequence.max_kv_tokens > self.slots.kv_tokens:
            raise ValueError(f"needs {sequence.max_kv_tokens} tokens of KV cache, which holds {self.slots.kv_tokens}")
        sequence.regime = 0 if self.border is None else self.border.regime(sequence.prompt_len)
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._wait(sequence)

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
        """Keep nothing that was computed with an adapter once the sequences that run with it have ended."""
        self.slots.forget(adapter)
        for sequence in (*self.running, *self.waiting):
            if sequence.adapter is adapter:
                sequence.shares_prefix = False

    def plan(self, draft: Draft | None = None) -> StepPlan:
        """Admit what fits and return the next step, which is empty only if nothing runs."""
        if self.border is not None:
            self._cross(self.border)
        retraction = self._retract()
        started = [] if retraction else self._admit()  # a sequence that was just retracted must not come back at once
        decode = [sequence for sequence in self.running if sequence.decoding and not sequence.ends]
        budget, of_prompt = self._prompt_tokens(len(decode))
        # Decoding sequences get their memory first; prompts take what is left in this step.
        room = self.slots.room
        for sequence in decode:
            _, room = self.slots.fit(sequence.slot, sequence.computed + 1, room)
        prefill = list(self._chunks(budget, of_prompt, room))
        drafts = self._drafts(decode, room, draft) if draft is not None and not prefill else {}
        for sequence in decode:
            self.slots.reserve(sequence.slot, sequence.computed + 1 + len(drafts.get(sequence, ())))
        for chunk in prefill:
            self.slots.reserve(chunk.sequence.slot, chunk.end)
        self._decay_ratio()
        states = self._states_planned(decode, prefill)
        return StepPlan(
            decode,
            prefill,
            started=started,
            retraction=retraction,
            drafts=drafts,
            states=states,
            **self._memory_planned(),
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

    def _memory_planned(self) -> dict[str, Any]:
        """Return what the planned step has to do before it computes, by the names of the plan's fields."""
        planned = self.slots.step_planned()
        if isinstance(planned, PageStep):
            return {"pages": planned}
        trims, copies = planned
        return {"trims": trims, "copies": copies}

    def _prompt_tokens(self, decoding: int) -> tuple[int, int]:
        """Return how many prompt tokens a step computes beside a number of sequences that decode, and of one prompt.

        These sequences wait meanwhile. So it is a chunk, unless more sequences than they wait for their first token,
        after a burst of requests say: then it is so many times as much. Only short prompts count, which the larger step
        completes. A long one gets no more than a chunk of any step.
        """
        chunk, most = self.limits.chunk_size, self.limits.chunk_size_when_idle
        if not decoding:
            return most, most
        short = sum(
            not sequence.decoding and len(sequence.tokens) - sequence.computed <= chunk for sequence in self.running
        )
        return max(chunk, min(most, chunk * short // decoding)), chunk

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
        wanted = [(sequence, self._may_draft(sequence)) for sequence in decode]
        return draft(wanted, len(decode), self.slots.draft_tokens(room, len(decode)))

    def _may_draft(self, sequence: Sequence) -> int:
        """Return how many tokens may follow the next one of a sequence in the same step: none beyond a border."""
        left = sequence.max_new_tokens - sequence.generated - 1
        if self.border is None or sequence.regime or not self.border.recomputes:
            return left
        return max(0, min(left, self.border.length - len(sequence.tokens)))

    def _set_computed(self, sequence: Sequence, tokens: int) -> None:
        sequence.computed = tokens
        self.slots.set_computed(sequence.slot, tokens)

    # --- the queue ---

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda entry: (entry.priority, entry.arrival))

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences into the batch while there is room; return those that run for the first time."""
        admitted: list[Sequence] = []
        try:
            for sequence in self._in_order() if self._has_place() else []:
                match = self._match(sequence)
                if match.coming - match.tokens >= _WORTH_WAITING and not self._overdue(sequence):
                    self.slots.follow(match)
                    continue  # a running sequence is about to compute the same prefix, to be reused then
                if not self._has_place() or not self._fits(sequence, match) or not self._start(sequence, match):
                    break
                admitted.append(sequence)
        finally:  # even if a later sequence fails: no sequence both waits and runs
            self._leave_queue(admitted)
        fresh = [sequence for sequence in admitted if sequence.cached < 0]
        for sequence in fresh:
            sequence.cached = sequence.computed
        return fresh

    def _leave_queue(self, admitted: list[Sequence]) -> None:
        if not admitted:
            return
        started = {id(sequence) for sequence in admitted}
        self.waiting = [sequence for sequence in self.waiting if id(sequence) not in started]
        for sequence in self.waiting:
            sequence.overtaken += sum(later.arrival > sequence.arrival for later in admitted)

    def _in_order(self) -> list[Sequence]:
        if self.limits.policy == "fcfs" or len(self.waiting) > _MAX_SORTED:
            return list(self.waiting)
        found = {id(sequence): self._match(sequence).tokens for sequence in self.waiting}
        return sorted(
            self.waiting,
            key=lambda entry: (entry.priority, not self._overdue(entry), -found[id(entry)], entry.arrival),
        )

    def _overdue(self, sequence: Sequence) -> bool:
        """Whether so many others have overtaken the sequence that it comes first: lpm alone could starve it."""
        return sequence.overtaken >= 2 * self.limits.max_running

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
        """Whether the KV cache holds what the running sequences and this one are expected to need at any time.

        All grow at the same rate, and each gives its memory back when it ends. So memory is highest just before one of
        them ends: at that time those with as much or more left to generate have grown by what that one had left.
        """
        if not self.running:
            return True
        lengths = [len(entry.tokens) for entry in self.running]
        held = self.slots.needed(lengths) - sum(lengths) - self.slots.shared(match)
        entries = sorted(map(self._expected, (*self.running, sequence)), reverse=True)
        for count, (left, tokens) in enumerate(entries, start=1):
            held += tokens
            if held + left * count > self.slots.kv_tokens:
                return False
        return True

    def _expected(self, sequence: Sequence) -> tuple[float, int]:
        """Return the tokens that the sequence is still expected to generate, and those that it occupies."""
        left = min(sequence.max_new_tokens - sequence.generated, _MAX_EXPECTED)
        return left * self.new_token_ratio, len(sequence.tokens)

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
            self.slots.fit(each.slot, each.computed + _least(each), room)[0] == each.computed + _least(each)
            for each in going
        )

    def _retract(self) -> Retraction | None:
        """Send running sequences back to the queue until the others can go on: of the lowest priority, the newest."""
        retracted: list[Sequence] = []
        while self.running and not self._can_go_on():
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
            self.slots.release(sequence.slot, sequence.adapter, sequence.keys)
        else:
            self.slots.discard(sequence.slot)
        sequence.slot, sequence.computed = -1, 0

    def _decay_ratio(self) -> None:
        """Lower the new-token ratio while memory suffices; reset it if nothing runs."""
        least = self._start_ratio * _RATIO_AT_END
        if not self.running:
            self.new_token_ratio = self._start_ratio
        elif self.new_token_ratio > least:
            self.new_token_ratio = max(least, self.new_token_ratio - (self._start_ratio - least) / _RATIO_STEPS)

    def _chunks(self, budget: int, of_prompt: int, room: int) -> Iterable[Chunk]:
        """Yield chunks of up to `budget` tokens, more for the rest of an image, and what `room` holds in any case."""
        for sequence in self.running:
            if budget <= 0:
                return
            if not sequence.decoding:
                # An empty chunk would get the logits of the row before it, which is another sequence's.
                assert sequence.computed < len(sequence.tokens), "the last token of a sequence was never appended"
                start = sequence.computed
                most, _ = self.slots.fit(sequence.slot, len(sequence.tokens), room)
                end = min(most, start + self._max_at_once(sequence, min(budget, of_prompt)))
                if self.slots.states is not None:
                    end = self.slots.states.end_of_chunk(sequence.slot, start, end)
                if sequence.images is not None:
                    end = sequence.images.chunk_end(start, end, most)
                if end <= start:  # there is no room yet, for an image or at all
                    continue
                budget -= end - start
                _, room = self.slots.fit(sequence.slot, end, room)
                yield Chunk(sequence, start, end)

    def _max_at_once(self, sequence: Sequence, budget: int) -> int:
        bucket = self.limits.prompt_bucket
        if bucket is None:
            return budget
        return 1 if sequence.computed else min(bucket, budget)


def _least(sequence: Sequence) -> int:
    """Return how many tokens the next chunk of a sequence has at least."""
    return 1 if sequence.images is None else sequence.images.next_tokens(sequence.computed)
