"""The contents of the slots of the KV cache, the memory behind them, and what is evicted when it runs short.

Slots whose tokens are mostly in another slot come first, so that copies of one prefix do not displace other prefixes.
Then the least recently used slot is shortened from its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from handlers.rolling_batch.schedule.prefix_tree import PrefixTree
from handlers.rolling_batch.schedule.state_table import StateTable

_MIN_EVICTED = 256  # tokens at a time: giving memory back takes two system calls per layer and head
_MAX_LOST = 0.25  # of the tokens of a slot; if others hold the rest, the slot is evicted before those in use less
_MIN_KEPT = 32  # tokens; fewer occupy a page per layer and head as well


@dataclass(slots=True, frozen=True)
class SlotTrim:
    """Give the memory behind all but the first `keep` tokens of `slot` back to the system."""

    slot: int
    keep: int


class SlotContents:
    """Slots 0 to `slots` - 1, which share the memory of `kv_tokens` tokens. `tree` has the tokens of all of them.

    Three numbers of tokens per slot: `running` or `cached` have valid keys and values, `needed` must keep their memory
    (a planned step is about to write some), `resident` may occupy memory. An emptied slot stays resident, because
    returned memory has to be provided again page by page; the next sequence writes to it.

    `trims` collects the memory that the next step gives back.
    """

    def __init__(self, slots: int, kv_tokens: int, states: StateTable | None) -> None:
        self.kv_tokens = kv_tokens
        self.states = states
        self.tree = PrefixTree()
        self.trims: list[SlotTrim] = []
        self.empty = dict.fromkeys(range(slots))  # an ordered set
        self.cached: dict[int, int] = {}  # tokens held by slot; the least recently used slot first
        self.running: dict[int, int] = {}  # tokens computed by slot
        self.resident = [0] * slots  # tokens whose memory may be in use
        self.needed = [0] * slots  # tokens whose memory must stay
        self.resident_tokens = 0  # never more than `kv_tokens` once a step is planned

    def usable(self, slot: int, tokens: int) -> int:
        """Return up to how many of the first `tokens` tokens of a slot another sequence can continue from."""
        return tokens if self.states is None else self.states.longest(slot, tokens)

    def held(self, slot: int) -> int:
        """Return how many tokens a running or cached slot holds."""
        return self.cached[slot] if slot in self.cached else self.running[slot]

    def fitness(self, slot: int) -> tuple[bool, int]:
        """Return a key that is greatest for the slot to continue in at the least loss."""
        return slot in self.cached, -self.held(slot)

    def touch(self, slot: int) -> None:
        """Count a cached slot as the most recently used one."""
        if slot in self.cached:
            self.cached[slot] = self.cached.pop(slot)

    def cached_in(self, slots: set[int]) -> int:
        """Return how many cached tokens these slots have."""
        return sum(self.cached.get(slot, 0) for slot in slots)

    def others(self, slots: set[int]) -> bool:
        """Whether a slot other than `slots` could be taken."""
        return bool(self.empty) or any(slot not in slots for slot in self.cached)

    def vacant(self, tokens: int, pinned: set[int]) -> int | None:
        """Return a slot whose content is not needed: if possible one with memory behind it, else an evicted one."""
        with_memory = max(self.empty, key=lambda slot: self.resident[slot], default=None)
        if with_memory is not None and self.resident[with_memory] > 0:
            return with_memory
        evictable = next(self._victims(pinned), None)
        short = self.resident_tokens + tokens > self.kv_tokens
        if evictable is not None and (short or with_memory is None):
            self.forget(evictable)
            return evictable
        return with_memory

    def set_resident(self, slot: int, tokens: int) -> None:
        """Count the memory of a slot's first `tokens` tokens as used."""
        self.resident_tokens += tokens - self.resident[slot]
        self.resident[slot] = tokens

    def give_way(self, pinned: set[int]) -> None:
        """Bring the resident tokens down to the limit: trim unneeded memory first, then evict cached tokens.

        The slots in `pinned` keep theirs.
        """
        for slot, needed in enumerate(self.needed):
            if self.resident[slot] > needed:
                self._trim(slot, needed)
                if self.resident_tokens <= self.kv_tokens:
                    return
        for slot in self._victims(pinned):
            held = self.cached[slot]
            short = max(self.resident_tokens - self.kv_tokens, _MIN_EVICTED)
            self._shorten(slot, 0 if self._is_copy(slot) else held - short)
            if self.resident_tokens <= self.kv_tokens:
                return
        raise AssertionError("the scheduler planned for more memory than there is")

    def _victims(self, pinned: set[int]) -> Iterator[int]:
        """Yield the cached slots to evict: near copies of others, then all, least recently used first."""
        slots = [slot for slot in self.cached if slot not in pinned]
        yield from (slot for slot in slots if self._is_copy(slot))
        yield from (slot for slot in slots if slot in self.cached)

    def _is_copy(self, slot: int) -> bool:
        """Whether other slots hold all but a small part of a cached slot now, or nothing of it is of use."""
        held = self.cached[slot]
        if not self.usable(slot, held):
            return True
        depth, others = self.tree.shared(slot)
        return held - max((min(depth, self.held(other)) for other in others), default=0) <= held * _MAX_LOST

    def _shorten(self, slot: int, keep: int) -> None:
        """Give back the memory of a cached slot behind its first `keep` tokens, or all of it if few would stay."""
        keep = self.usable(slot, max(keep, 0))
        if keep < _MIN_KEPT:
            self.forget(slot)
            keep = 0
        else:
            self.tree.shorten(slot, keep)
            if self.states is not None:
                self.states.shorten(slot, keep)
            self.cached[slot] = keep
            self.needed[slot] = keep
        self._trim(slot, keep)

    def forget(self, slot: int) -> None:
        """Empty a cached slot, but leave its memory behind it."""
        del self.cached[slot]
        if self.states is not None:
            self._hand_over(self.states, slot)
        self.tree.remove(slot)
        self.needed[slot] = 0
        self.empty[slot] = None

    def _hand_over(self, states: StateTable, slot: int) -> None:
        """Give the snapshots of a slot to another slot, as far as it begins with the same tokens."""
        depth, others = self.tree.shared(slot)
        states.hand_over(slot, {other: min(depth, self.held(other)) for other in others})

    def _trim(self, slot: int, keep: int) -> None:
        self.trims.append(SlotTrim(slot, keep))
        self.set_resident(slot, keep)
