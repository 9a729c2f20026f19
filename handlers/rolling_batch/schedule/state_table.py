"""The rows of a store of states: those of running sequences, and snapshots of prefixes.

A state belongs to one length of one sequence: it cannot be cut to a prefix as keys and values can. So a slot's tokens
are of use to another sequence only up to a length at which its state was kept. Such snapshots are taken

- of what a sequence leaves behind when it ends or is retracted, at no cost;
- where prompts were seen to part: another sequence waits for a prefix, or had to compute it again (as in Marconi, Pan
  et al., 2024);
- at the ends of prompt chunks, each at least twice as far as the one before.

Snapshots take the rows that running sequences leave over; the least recently used one gives way.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_PREFIX = 16  # tokens; computing fewer is not worth a snapshot


@dataclass(slots=True, frozen=True)
class RowCopy:
    """Copy a state from one row to another."""

    source: int
    target: int


@dataclass(slots=True, frozen=True)
class StateStep:
    """What a step does with states: `copies` in order, then the pass over the `rows` by slot, then `saves` in order."""

    rows: dict[int, int]
    copies: list[RowCopy] = field(default_factory=list)
    saves: list[RowCopy] = field(default_factory=list)


class StateTable:
    """Rows 0 to `rows` - 1. At most so many sequences run at a time."""

    def __init__(self, rows: int) -> None:
        self.copies: list[RowCopy] = []
        self.saves: list[RowCopy] = []
        self._free = list(range(rows))
        self._running: dict[int, int] = {}  # rows by slot
        self._kept: dict[tuple[int, int], int] = {}  # rows by slot and length; the least recently used first
        self._lengths: dict[int, list[int]] = {}  # of each slot's snapshots, in order
        self._wanted: dict[int, list[int]] = {}  # lengths at which running sequences are to leave a snapshot

    @property
    def snapshots(self) -> int:
        """Snapshots that are kept."""
        return len(self._kept)

    def longest(self, slot: int, tokens: int) -> int:
        """Return the greatest length up to `tokens` at which the slot has a snapshot; 0 if there is none."""
        lengths = self._lengths.get(slot, ())
        place = bisect.bisect_right(lengths, tokens)
        return lengths[place - 1] if place else 0

    def claim(self, slot: int, source: int, tokens: int, known: int = 0) -> None:
        """Give a sequence in `slot` a state of its own: a copy of the snapshot of `source` at `tokens`, if not 0.

        If the sequence continues in `source` itself, its later tokens there are gone. Its first `known` tokens were
        seen before.
        """
        if source == slot:
            self.shorten(slot, tokens)
        else:
            self.drop(slot)
        kept = self._kept.pop((source, tokens)) if tokens else None
        if kept is not None:
            self._kept[source, tokens] = kept  # the most recently used now
        row = self._row()
        if kept is not None and row != kept:  # the last free row may be that of the snapshot
            self.copies.append(RowCopy(kept, row))
        self._running[slot] = row
        if known - tokens >= MIN_PREFIX:  # two sequences have had these tokens: the next one finds a snapshot
            self.want(slot, known)

    def release(self, slot: int, tokens: int) -> None:
        """Take the state of a sequence that leaves as the snapshot of its `tokens` tokens."""
        self._wanted.pop(slot, None)
        row = self._running.pop(slot)
        if tokens in self._lengths.get(slot, ()):
            self._free.append(row)
        else:
            self._keep(slot, tokens, row)

    def discard(self, slot: int) -> None:
        """Take the state of a sequence that leaves and whose states may be wrong, with all its snapshots."""
        self._wanted.pop(slot, None)
        if slot in self._running:
            self._free.append(self._running.pop(slot))
        self.drop(slot)

    def drop(self, slot: int) -> None:
        """Forget the snapshots of a slot."""
        self.shorten(slot, 0)

    def shorten(self, slot: int, tokens: int) -> None:
        """Forget the snapshots of a slot behind its first `tokens` tokens."""
        for length in [length for length in self._lengths.get(slot, ()) if length > tokens]:
            self._free.append(self._forget(slot, length))

    def move(self, slot: int, other: int, tokens: int) -> None:
        """Give the snapshots of a slot up to `tokens` to another slot with the same first tokens."""
        own = self._lengths.get(other, ())
        for length in [length for length in self._lengths.get(slot, ()) if length <= tokens and length not in own]:
            self._keep(other, length, self._forget(slot, length))

    def hand_over(self, slot: int, others: Mapping[int, int]) -> None:
        """Forget a slot, but give its snapshots to others, as far as these begin with so many of its tokens."""
        for other, tokens in others.items():
            self.move(slot, other, tokens)
        self.drop(slot)

    # --- lengths at which to keep a snapshot ---

    def want(self, slot: int, tokens: int) -> None:
        """Have the running sequence of a slot leave a snapshot when it has computed `tokens` tokens."""
        wanted = self._wanted.setdefault(slot, [])
        if tokens not in wanted:
            bisect.insort(wanted, tokens)

    def end_of_chunk(self, slot: int, start: int, end: int) -> int:
        """Return where a chunk `start:end` has to end so that a wanted snapshot can be taken behind it."""
        return next((length for length in self._wanted.get(slot, ()) if start < length < end), end)

    def chunk_planned(self, slot: int, end: int, completes: bool) -> None:
        """Keep a snapshot behind a chunk that ends at `end`, if it is of use. Not behind a whole prompt.

        The last token of a prompt is computed in any case, so that no other sequence continues there.
        """
        last = (self._lengths.get(slot) or (0,))[-1]
        at_border = not completes and end >= max(2 * last, MIN_PREFIX)
        if end in self._lengths.get(slot, ()) or not (at_border or end in self._wanted.get(slot, ())):
            return
        if self._free or self._kept:
            row = self._row()
            self.saves.append(RowCopy(self._running[slot], row))
            self._keep(slot, end, row)

    def step_planned(self, slots: list[int]) -> StateStep:
        """Return the work of the planned step, which computes the sequences in `slots`; forget it here."""
        step = StateStep({slot: self._running[slot] for slot in slots}, self.copies, self.saves)
        self.copies, self.saves = [], []
        return step

    def check(self) -> None:
        """Raise AssertionError if a row has two owners, or none."""
        rows = [*self._free, *self._running.values(), *self._kept.values()]
        assert sorted(rows) == list(range(len(rows)))
        assert {(slot, length) for slot, own in self._lengths.items() for length in own} == self._kept.keys()

    # --- rows ---

    def _row(self) -> int:
        """Return a free row; forget the least recently used snapshot if there is none."""
        return self._free.pop() if self._free else self._forget(*next(iter(self._kept)))

    def _keep(self, slot: int, tokens: int, row: int) -> None:
        self._kept[slot, tokens] = row
        bisect.insort(self._lengths.setdefault(slot, []), tokens)

    def _forget(self, slot: int, tokens: int) -> int:
        self._lengths[slot].remove(tokens)
        if not self._lengths[slot]:
            del self._lengths[slot]
        return self._kept.pop((slot, tokens))
