"""Who has which pages of the KV cache: running sequences, and cached ones of the past.

A page is free when no sequence has it. If more are wanted than are free, cached tokens go, the least recently used ones
first, from the end of their sequence. Where layers keep states, tokens behind the last snapshot of a sequence are of no
use to others.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from handlers.rolling_batch.schedule.prefix_tree import PrefixTree
from handlers.rolling_batch.schedule.state_table import StateTable

_EVICTED_AT_ONCE = 1 / 64  # of all pages, at least: eviction changes the tree, which not every step shall do


@dataclass(slots=True)
class PagedSequence:
    """The pages of a sequence and how many of its tokens they hold; `continues` is the cached one that it contains."""

    pages: list[int]
    tokens: int
    continues: int = -1


class PageOwners:
    """Pages 0 to `pages` - 1 of `page` tokens each. `tree` has the tokens of all sequences.

    A sequence is in `running` by its slot, or in `cached` by a number of its own, the least recently used one first. If
    layers keep states, `states` knows their snapshots by the same numbers.
    """

    def __init__(self, pages: int, page: int, states: StateTable | None = None) -> None:
        self.pages = pages
        self.page = page
        self.states = states
        self.tree = PrefixTree()
        self.running: dict[int, PagedSequence] = {}
        self.cached: dict[int, PagedSequence] = {}
        self.used = 0  # pages that running sequences have, each counted once
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages  # sequences that have the page
        self._users = [0] * pages  # those of them that run

    @property
    def free(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def is_used(self, page: int) -> bool:
        """Whether a running sequence has the page."""
        return self._users[page] > 0

    def sequence(self, owner: int) -> PagedSequence:
        return self.running[owner] if owner in self.running else self.cached[owner]

    def touch(self, owner: int) -> None:
        """Count a cached sequence as the most recently used one."""
        if owner in self.cached:
            self.cached[owner] = self.cached.pop(owner)

    def pages_of(self, tokens: int) -> int:
        """Return how many pages so many tokens fill or begin."""
        return -(-tokens // self.page)

    def full_of(self, owner: int, tokens: int) -> list[int]:
        """Return the pages that are full of the first `tokens` tokens of a sequence; none for no tokens."""
        return self.sequence(owner).pages[: tokens // self.page] if tokens else []

    def usable(self, owner: int, tokens: int) -> int:
        """Return how many of the first `tokens` tokens of a sequence others can continue from."""
        tokens = min(tokens, self.sequence(owner).tokens)
        return tokens if self.states is None else self.states.longest(owner, tokens)

    def with_all(self, adapter: Hashable, tokens: list[int]) -> int | None:
        """Return a sequence with all of these tokens; if it is a cached one, it counts as used."""
        for common, owners in self.tree.match(adapter, tokens)[:1]:
            known = (owner for owner in owners if self.sequence(owner).tokens >= len(tokens) == common)
            if (owner := next(known, None)) is not None:
                self.touch(owner)
                return owner
        return None

    def take(self, sequence: PagedSequence, pages: Iterable[int]) -> None:
        """Give pages to a running sequence."""
        for page in pages:
            sequence.pages.append(page)
            self.used += not self._users[page]
            self._owners[page] += 1
            self._users[page] += 1

    def grow(self, sequence: PagedSequence, pages: int) -> None:
        """Give as many free pages to a running sequence; evict cached tokens if necessary."""
        if len(self._free) < pages:
            self._evict(pages)
        self.take(sequence, (self._free.pop() for _ in range(pages)))

    def stop(self, slot: int) -> PagedSequence:
        """Take a sequence out of the running ones. It has its pages still."""
        sequence = self.running.pop(slot)
        self.tree.remove(slot)
        for page in sequence.pages:
            self._users[page] -= 1
            self.used -= not self._users[page]
        return sequence

    def cut(self, sequence: PagedSequence, keep: int) -> list[int]:
        """Take all but the first `keep` pages from a sequence that does not run; return the pages freed by it."""
        freed = []
        for page in sequence.pages[keep:]:
            self._owners[page] -= 1
            if not self._owners[page]:
                freed.append(page)
        del sequence.pages[keep:]
        self._free += freed
        return freed

    def forget(self, number: int) -> None:
        """Drop a cached sequence."""
        if self.states is not None:
            depth, others = self.tree.shared(number)
            self.states.hand_over(number, {other: min(depth, self.sequence(other).tokens) for other in others})
        self.tree.remove(number)
        self.cut(self.cached.pop(number), 0)

    def check(self) -> None:
        """Raise AssertionError if counts do not match the lists, or a sequence could write shared pages."""
        everyone = [*self.running.values(), *self.cached.values()]
        owners, users = [0] * self.pages, [0] * self.pages
        for counts, sequences in ((owners, everyone), (users, self.running.values())):
            for page in itertools.chain(*(sequence.pages for sequence in sequences)):
                counts[page] += 1
        assert (owners, users) == (self._owners, self._users)
        assert self.used == sum(count > 0 for count in users)
        assert sorted(self._free) == [page for page, count in enumerate(owners) if not count]
        for sequence in self.running.values():
            assert len(sequence.pages) * self.page >= sequence.tokens
            assert all(owners[page] == 1 for page in sequence.pages[sequence.tokens // self.page :])
        for sequence in self.cached.values():
            assert len(sequence.pages) == -(-sequence.tokens // self.page) > 0

    def _evict(self, pages: int) -> None:
        """Drop cached tokens until so many pages are free."""
        wanted = max(pages, int(self.pages * _EVICTED_AT_ONCE))
        for number in [number for number, own in self.cached.items() if not self.usable(number, own.tokens)]:
            self.forget(number)
        for number in list(self.cached):
            if len(self._free) >= wanted:
                return
            self._shorten(number, self._fitting(self.cached[number], wanted - len(self._free)))
        assert len(self._free) >= pages, "the scheduler planned for more memory than there is"

    def _shorten(self, number: int, keep: int) -> None:
        """Drop what a cached sequence has behind its first `keep` pages, or all of it if nothing else is of use."""
        sequence, tokens = self.cached[number], self.usable(number, keep * self.page)
        if not tokens:
            self.forget(number)
            return
        self.tree.shorten(number, tokens)
        if self.states is not None:
            self.states.shorten(number, tokens)
        sequence.tokens = tokens
        self.cut(sequence, self.pages_of(tokens))

    def _fitting(self, sequence: PagedSequence, wanted: int) -> int:
        """Return how many pages a cached sequence can keep if its last ones are to free `wanted` pages."""
        keep = len(sequence.pages)
        while keep and wanted > 0:
            keep -= 1
            wanted -= self._owners[sequence.pages[keep]] == 1
        return keep
