"""A scheduler whose plans are carried out on plain lists, and checked step by step."""

from __future__ import annotations

from typing import Any

from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits, Sequence, StepPlan


class Batch:
    """A scheduler, and the slots as its plans would fill them: each step is checked against the tokens that it needs.

    The next token of a sequence is a function of its tokens, as with a model.
    """

    def __init__(
        self, max_running: int = 4, kv_tokens: int = 1000, chunk: int = 10, idle_chunk: int = 40, **limits: Any
    ) -> None:
        self.limits = SchedulerLimits(max_running, kv_tokens, chunk, idle_chunk, **limits)
        self.scheduler = Scheduler(self.limits)
        self.written: dict[int, list[tuple[str | None, int]]] = {}  # adapter and token of each row of a slot
        self.states: dict[int, list[tuple[str | None, int]]] = {}  # what went into the state of each row of states
        self.plan = StepPlan([], [])
        self.retracted = 0

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    @property
    def running(self) -> list[str]:
        return [name_of(sequence) for sequence in self.scheduler.running]

    def step(self) -> tuple[list[str], list[tuple[str, int, int]]]:
        """Run one step, with a token for each sequence that gets logits; return what was planned."""
        plan = self.plan = self.scheduler.plan()
        self.retracted += len(plan.retraction.sequences) if plan.retraction else 0
        for trim in plan.trims:
            del self.written.setdefault(trim.slot, [])[trim.keep :]
        for copy in plan.copies:
            source, target = (self.written.setdefault(slot, []) for slot in (copy.source, copy.target))
            assert len(source) >= copy.tokens
            target[: copy.tokens] = source[: copy.tokens]
        for state in plan.states.copies if plan.states else ():
            self.states[state.target] = list(self.states[state.source])
        rows = [(sequence, sequence.computed, sequence.computed + 1) for sequence in plan.decode]
        rows += [(chunk.sequence, chunk.start, chunk.end) for chunk in plan.prefill]
        for sequence, start, end in rows:
            self._compute(sequence, start, end)
        for state in plan.states.saves if plan.states else ():
            self.states[state.target] = list(self.states[state.source])
        if self.scheduler.slots.states is not None:
            self.scheduler.slots.states.check()
        self.scheduler.advance(plan)
        for sequence, _, end in rows:
            if end == len(sequence.tokens):
                sequence.tokens.append(next_token(sequence.tokens))
                if sequence.generated == sequence.max_new_tokens:
                    self.scheduler.remove(sequence)
        return (
            [name_of(sequence) for sequence in plan.decode],
            [(name_of(chunk.sequence), chunk.start, chunk.end) for chunk in plan.prefill],
        )

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    @property
    def resident(self) -> int:
        return sum(map(len, self.written.values()))

    def _compute(self, sequence: Sequence, start: int, end: int) -> None:
        """Assert that the rows before `start` hold this sequence's tokens, whoever computed them."""
        slot = self.written.setdefault(sequence.slot, [])
        assert slot[:start] == [(sequence.adapter, token) for token in sequence.tokens[:start]]
        assert end <= len(sequence.tokens)
        slot[start:end] = [(sequence.adapter, token) for token in sequence.tokens[start:end]]
        if self.plan.states is not None:
            row = self.plan.states.rows[sequence.slot]
            assert start == 0 or self.states[row] == slot[:start]
            self.states[row] = slot[:end]


_names: dict[int, str] = {}  # of sequences, by number


def number_of(name: str) -> int:
    """Return a new number for a sequence that the test calls `name`."""
    number = len(_names)
    _names[number] = name
    return number


def name_of(sequence: Sequence) -> str:
    return _names[sequence.number]


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) + len(tokens)) % 3


def sequence(name: str, prompt: int | list[int], new: int = 5, priority: int = 3, **more: Any) -> Sequence:
    """Return a sequence with a unique prompt of so many tokens, or with the given prompt."""
    tokens = [hash(name)] + [1] * (prompt - 1) if isinstance(prompt, int) else list(prompt)
    return Sequence(number_of(name), tokens, len(tokens), new, priority, **more)
