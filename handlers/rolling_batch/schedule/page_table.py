"""The contents of the pages of the KV cache: plain data, no tensors (PagedAttention, Kwon et al., SOSP 2023).

A page has room for a fixed number of tokens. A sequence has a list of pages; only the last one is not full. A sequence
keeps the number of its slot as long as it runs. Sequences that begin with the same tokens share the pages full of them,
which are not written any more. If the common tokens end within a page, the newcomer gets a copy of that page. When a
sequence leaves, its pages stay with its tokens (cached) until they are needed.

Layers with states have no pages: a StateTable has their rows. Where there are such layers, a sequence continues only at
a length at which a snapshot of the states was kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from handlers.rolling_batch.schedule.page_owners import PagedSequence, PageOwners
from handlers.rolling_batch.schedule.slots import MIN_COPIED, Match, with_leader
from handlers.rolling_batch.schedule.state_table import StateTable


@dataclass(slots=True, frozen=True)
class PagesAdded:
    """The pages of the sequence in `slot` from its page `first` on; tokens there are about to be computed or read."""

    slot: int
    first: int
    pages: list[int]


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Copy the keys and values of a whole page. All copies of a step are made at once, before anything is written."""

    source: int
    target: int


@dataclass(slots=True, frozen=True)
class PageStep:
    """What a step does with pages before it computes."""

    added: list[PagesAdded] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)


class PageTable:
    """`kv_tokens // page` pages of `page` tokens, for sequences that run in slots 0 to `slots` - 1.

    It has the methods of a SlotTable. Memory is counted in pages; a page that several running sequences share counts
    once. If layers keep states, `states` says at which lengths others can continue from a sequence.
    """

    def __init__(self, slots: int, kv_tokens: int, page: int, states: StateTable | None = None) -> None:
        self.kv_tokens = kv_tokens // page * page
        self.states = states
        self._page = page
        self._owners = PageOwners(kv_tokens // page, page, states)
        self._running = self._owners.running
        self._empty = list(range(slots - 1, -1, -1))
        self._numbers = itertools.count(slots)  # of cached sequences
        self._listed: dict[int, int] = {}  # by slot: pages that earlier steps have added
        self._copies: dict[int, int] = {}  # sources by target

    @property
    def cached_tokens(self) -> int:
        """Tokens in pages of sequences that have left alone."""
        owners = self._owners
        return (owners.pages - owners.free - owners.used) * self._page

    # --- memory ---

    @property
    def room(self) -> int:
        """Pages that no running sequence has."""
        return self._owners.pages - self._owners.used

    def fit(self, slot: int, end: int, room: int) -> tuple[int, int]:
        """Return how many tokens, up to `end`, a running sequence can have in `room` more pages; and the pages left."""
        own = len(self._running[slot].pages)
        end = min(end, (own + room) * self._page)
        return end, room - max(0, self._owners.pages_of(end) - own)

    def draft_tokens(self, room: int, sequences: int) -> int:
        """Return how many tokens can be drafted in `room` pages, however they are divided among the sequences."""
        return room // max(sequences, 1) * self._page

    def needed(self, lengths: Iterable[int]) -> int:
        """Return the memory, in tokens, of the running sequences once they have these lengths."""
        listed = sum(len(sequence.pages) for sequence in self._running.values())
        return (sum(map(self._owners.pages_of, lengths)) - (listed - self._owners.used)) * self._page

    def shared(self, match: Match) -> int:
        """Return how many tokens a newcomer shares with running sequences."""
        return sum(map(self._owners.is_used, self._owners.full_of(match.slot, match.tokens))) * self._page

    # --- sequences ---

    def find(self, adapter: Hashable, tokens: list[int]) -> Match:
        """Return the sequence, running or cached, that has the longest prefix of `tokens`, not counting the last one.

        The last token is computed in any case, because its logits choose the next one.
        """
        best, longest = Match(-1, 0, 0), 0
        matches = self._owners.tree.match(adapter, tokens)
        for common, owners in matches:
            depth = min(common, len(tokens) - 1)
            longest = max(longest, depth)
            if depth <= best.tokens:
                break
            for owner in owners:
                held = self._owners.usable(owner, depth)
                if held > best.tokens:
                    best = Match(owner, held, longest)
                if held == depth:
                    break
        if self.states is None:
            return Match(best.slot, best.tokens, longest)
        return with_leader(best, longest, matches, {slot: own.tokens for slot, own in self._running.items()})

    def claim(self, adapter: Hashable, tokens: list[int], match: Match, spare: int) -> tuple[int, int] | None:
        """Take a slot for a sequence of `tokens`; return it and how many of them it holds.

        Returns None if there is no room. `spare` is the memory, in tokens, that no running sequence needs.
        """
        if not self._empty or self._owners.pages_of(len(tokens)) * self._page - self.shared(match) > spare:
            return None
        slot = self._empty.pop()
        if self.states is not None:
            match = match if match.tokens >= MIN_COPIED else replace(match, slot=-1, tokens=0)
            self.states.claim(slot, match.slot, match.tokens, match.known)
        pages = self._owners.full_of(match.slot, match.tokens)
        sequence = self._running[slot] = PagedSequence([], len(pages) * self._page)
        self._owners.take(sequence, pages)
        if match.slot >= 0:
            self._continue(sequence, match)
        self._owners.tree.insert(slot, adapter, tokens)
        self._listed[slot] = 0
        return slot, sequence.tokens

    def follow(self, match: Match) -> None:
        """Have a running sequence leave a snapshot for one that waits for it; the pages will be there in any case."""
        if self.states is not None and match.leader >= 0:
            self.states.want(match.leader, match.coming)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a running sequence pages for its first `tokens` tokens; evict cached tokens if necessary."""
        sequence = self._running[slot]
        if tokens > len(sequence.pages) * self._page:
            self._owners.grow(sequence, self._owners.pages_of(tokens) - len(sequence.pages))

    def set_computed(self, slot: int, tokens: int) -> None:
        """Record that the first `tokens` tokens of a running sequence are in its pages."""
        self._running[slot].tokens = tokens

    def release(self, slot: int, adapter: Hashable, tokens: list[int]) -> None:
        """Take the slot back from a sequence that leaves; the computed part of its `tokens` stays cached."""
        held = min(self._running[slot].tokens, len(tokens))
        if not held:
            self.discard(slot)
            return
        sequence = self._leave(slot)
        sequence.tokens = held
        self._cut(sequence, self._owners.pages_of(held))
        number = self._owners.with_all(adapter, tokens[:held])
        if number is None:
            number = next(self._numbers)
            self._owners.tree.insert(number, adapter, tokens[:held])
            self._owners.cached[number] = sequence
        if self.states is not None:
            self.states.release(slot, held)
            self.states.hand_over(slot, {number: held})
        if sequence.continues in self._owners.cached and sequence.continues != number:
            self._owners.forget(sequence.continues)
        if self._owners.sequence(number) is not sequence:
            self._cut(sequence, 0)

    def discard(self, slot: int) -> None:
        """Take the slot back from a sequence whose keys and values may be wrong."""
        if self.states is not None:
            self.states.discard(slot)
        self._cut(self._leave(slot), 0)

    def forget(self, adapter: Hashable) -> None:
        """Drop what is cached of a removed adapter."""
        for number in self._owners.tree.slots_of(adapter) & self._owners.cached.keys():
            self._owners.forget(number)

    def step_planned(self) -> PageStep:
        """Return what the planned step has to do before it computes; forget it here."""
        added = []
        for slot, first in self._listed.items():
            pages = self._running[slot].pages
            if first < len(pages):
                added.append(PagesAdded(slot, first, pages[first:]))
                self._listed[slot] = len(pages)
        copies = [PageCopy(source, target) for target, source in self._copies.items() if source != target]
        self._copies = {}
        return PageStep(added, copies)

    def check(self) -> None:
        """Raise AssertionError if a page or a slot is lost, or has owners that it must not have."""
        self._owners.check()
        slots = sorted([*self._running, *self._empty])
        assert slots == list(range(len(slots)))
        assert self._listed.keys() == self._running.keys()

    def _continue(self, sequence: PagedSequence, match: Match) -> None:
        """Copy the page in which the common tokens end, and let the sequence with them be evicted later."""
        source = self._owners.sequence(match.slot)
        self._owners.touch(match.slot)
        if source.tokens == match.tokens:
            sequence.continues = match.slot
        # A state is that of all these tokens, however few of them are in the last page.
        if match.tokens - sequence.tokens >= (MIN_COPIED if self.states is None else 1):
            page = source.pages[len(sequence.pages)]
            self._owners.grow(sequence, 1)  # may evict the source: it is read before anything is written
            self._copies[sequence.pages[-1]] = self._copies.get(page, page)
            sequence.tokens = match.tokens

    def _leave(self, slot: int) -> PagedSequence:
        """Take a sequence out of its slot."""
        self._empty.append(slot)
        del self._listed[slot]
        return self._owners.stop(slot)

    def _cut(self, sequence: PagedSequence, keep: int) -> None:
        for page in self._owners.cut(sequence, keep):
            self._copies.pop(page, None)  # the copy would have no reader
