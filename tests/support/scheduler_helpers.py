"""A scheduler whose plans are carried out on plain lists, and checked step by step."""

from __future__ import annotations

from typing import Any

from handlers.rolling_batch.schedule.page_table import PageStep
from handlers.rolling_batch.schedule.plan import Sequence, StepPlan
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits


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
        self.tables: dict[int, list[int]] = {}  # the pages of each slot, if there are pages
        self.paged: dict[tuple[int, int], tuple[str | None, int]] = {}  # adapter and token by page and place
        self.copied = 0
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
        self._apply(plan.pages)
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
        assert end <= len(sequence.tokens)
        self._compute_state(sequence, start, end)
        if self.limits.page:
            self._compute_in_pages(sequence, start, end)
            return
        slot = self.written.setdefault(sequence.slot, [])
        assert slot[:start] == [(sequence.adapter, token) for token in sequence.tokens[:start]]
        slot[start:end] = [(sequence.adapter, token) for token in sequence.tokens[start:end]]

    def _compute_state(self, sequence: Sequence, start: int, end: int) -> None:
        if self.plan.states is not None:
            rows = [(sequence.adapter, token) for token in sequence.tokens[:end]]
            row = self.plan.states.rows[sequence.slot]
            assert start == 0 or self.states[row] == rows[:start]
            self.states[row] = rows

    def _apply(self, pages: PageStep) -> None:
        size = self.limits.page
        read = [[self.paged.get((copy.source, place)) for place in range(size)] for copy in pages.copies]
        for copy, rows in zip(pages.copies, read, strict=True):
            self.paged.update({(copy.target, place): row for place, row in enumerate(rows) if row is not None})
        self.copied += len(pages.copies)
        for added in pages.added:
            self.tables.setdefault(added.slot, [])[added.first :] = added.pages

    def _compute_in_pages(self, sequence: Sequence, start: int, end: int) -> None:
        """The same over pages; none of those that are written belongs to another sequence."""
        size, table = self.limits.page, self.tables[sequence.slot]
        rows = [(sequence.adapter, token) for token in sequence.tokens]
        places = [(table[place // size], place % size) for place in range(end)]
        assert [self.paged.get(place) for place in places[:start]] == rows[:start]
        self.paged.update(zip(places[start:], rows[start:end], strict=True))
        written = {page for page, _ in places[start:]}
        for other in self.scheduler.running:
            assert other is sequence or not written & set(self.tables.get(other.slot, [])[: -(-other.computed // size)])


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
