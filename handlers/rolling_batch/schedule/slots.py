"""What each slot of the KV cache holds, and how much memory is behind it: plain data, no tensors.

A slot belongs to a running sequence, or keeps the tokens of one that has left (cached), or is empty. If a slot begins
with the first tokens of a new sequence, the sequence continues there if the slot is free, or these tokens are copied to
another slot: copying costs about a hundredth of computing. Before the slots exceed the memory of `kv_tokens` tokens,
cached tokens are evicted. Slots whose tokens are mostly in another slot come first, so that copies of one prefix do not
displace other prefixes. Then the least recently used slot is shortened from its end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from handlers.rolling_batch.schedule.prefix_tree import PrefixTree
from handlers.rolling_batch.schedule.state_table import MIN_PREFIX, StateTable

_MIN_COPIED = 4  # tokens; computing fewer is as fast as copying
_TAIL_WORTH_KEEPING = 16  # cached tokens behind a match; for more of them the match is copied, not overwritten
_MIN_EVICTED = 256  # tokens at a time: giving memory back takes two system calls per layer and head
_MAX_LOST = 0.25  # of the tokens of a slot; if others hold the rest, the slot is evicted before those in use less
_MIN_KEPT = 32  # tokens; fewer occupy a page per layer and head as well


@dataclass(slots=True, frozen=True)
class SlotTrim:
    """Give the memory behind all but the first `keep` tokens of `slot` back to the system."""

    slot: int
    keep: int


@dataclass(slots=True, frozen=True)
class SlotCopy:
    """Copy keys and values of the first `tokens` tokens from one slot to another."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, frozen=True)
class Match:
    """The first `tokens` tokens are in `slot` now; `coming` are in some slot once a running sequence is computed.

    With states, `leader` is the slot of that sequence, and `known` tokens were seen before, of use or not.
    """

    slot: int
    tokens: int
    coming: int
    leader: int = -1
    known: int = 0


class SlotTable:
    """Slots 0 to `slots` - 1, which share the memory of `kv_tokens` tokens.

    `trims` and `copies` collect what the next step has to do before it computes, in this order.

    Three numbers of tokens per slot: `_running` or `_cached` have valid keys and values, `_needed` must keep their
    memory (a planned step is about to write some), `_resident` may occupy memory. A slot that has been emptied stays
    resident, because memory that is given back has to be provided again page by page; the next sequence writes to it.

    If layers keep states, `states` says up to which lengths a slot is of use to others.
    """

    def __init__(self, slots: int, kv_tokens: int, states: StateTable | None = None) -> None:
        self.kv_tokens = kv_tokens
        self.states = states
        self.trims: list[SlotTrim] = []
        self.copies: list[SlotCopy] = []
        self._tree = PrefixTree()
        self._empty = dict.fromkeys(range(slots))  # an ordered set
        self._cached: dict[int, int] = {}  # tokens held by slot; the least recently used slot first
        self._running: dict[int, int] = {}  # tokens computed by slot
        self._resident = [0] * slots  # tokens whose memory may be in use
        self._needed = [0] * slots  # tokens whose memory must stay
        self._resident_tokens = 0  # never more than `kv_tokens` once a step is planned

    @property
    def cached_tokens(self) -> int:
        """Tokens of sequences that have left."""
        return sum(self._cached.values())

    # --- memory, in tokens ---

    @property
    def room(self) -> int:
        """Tokens that no running sequence has."""
        return self.kv_tokens - sum(self._running.values())

    def fit(self, slot: int, end: int, room: int) -> tuple[int, int]:
        """Return how many tokens, up to `end`, a running sequence can have in `room` more; and the room left."""
        own = self._running[slot]
        end = min(end, own + room)
        return end, room - (end - own)

    def draft_tokens(self, room: int, sequences: int) -> int:
        """Return how many tokens can be drafted in `room`, however they are divided among the sequences."""
        return room

    def needed(self, lengths: Iterable[int]) -> int:
        """Return the memory of the running sequences once they have these lengths."""
        return sum(lengths)

    def shared(self, match: Match) -> int:
        """Return how many tokens a newcomer shares with running sequences: none, it gets a copy."""
        return 0

    # --- sequences ---

    def find(self, adapter: Hashable, tokens: list[int]) -> Match:
        """Return the slot that holds the longest prefix of `tokens`, not counting the last one.

        The last token is computed in any case, because its logits choose the next one.
        """
        best = Match(-1, 0, 0)
        longest = 0
        matches = self._tree.match(adapter, tokens)
        for common, slots in matches:
            depth = min(common, len(tokens) - 1)
            longest = max(longest, depth)
            if depth <= best.tokens:
                break
            for slot in slots:
                held = self._usable(slot, min(depth, self._held(slot)))
                if held > best.tokens or (held == best.tokens > 0 and self._fitness(slot) > self._fitness(best.slot)):
                    best = Match(slot, held, longest)
        if self.states is None:
            return Match(best.slot, best.tokens, longest)
        return self._with_leader(best, longest, matches)

    def _with_leader(self, best: Match, known: int, matches: list[tuple[int, set[int]]]) -> Match:
        """Add the running sequence that can still leave a snapshot of the longest prefix."""
        for common, slots in matches:
            depth = min(common, known)
            leaders = [slot for slot in slots if self._running.get(slot, depth) < depth]
            if leaders and depth > best.tokens:
                return Match(best.slot, best.tokens, depth, max(leaders, key=self._held), known)
        return Match(best.slot, best.tokens, best.tokens, -1, known)

    def follow(self, match: Match) -> None:
        """Have a running sequence leave a snapshot for one that waits for it."""
        if self.states is not None and match.leader >= 0:
            self.states.want(match.leader, match.coming)

    def claim(self, adapter: Hashable, tokens: list[int], match: Match, spare: int) -> tuple[int, int] | None:
        """Take a slot for a sequence of `tokens`; return it and how many of them it holds.

        Returns None if this step needs every slot. `spare` is the memory, in tokens, that no running sequence needs.
        """
        slot, held = self._choose(tokens, match, spare)
        if slot is None:
            return None
        self._empty.pop(slot, None)
        self._cached.pop(slot, None)
        if slot != match.slot:
            held = match.tokens if match.tokens >= _MIN_COPIED else 0
            if held:
                self.copies.append(SlotCopy(match.slot, slot, held))
                self._touch(match.slot)
        if self.states is not None:
            self._claim_state(self.states, slot, match, held)
        self._tree.remove(slot)
        self._tree.insert(slot, adapter, tokens)
        self._running[slot] = held
        self._needed[slot] = 0
        self.reserve(slot, held)
        return slot, held

    def _claim_state(self, states: StateTable, slot: int, match: Match, held: int) -> None:
        states.claim(slot, match.slot if held else -1, held)
        if match.known - held >= MIN_PREFIX:  # two sequences have had these tokens: the next one finds a snapshot
            states.want(slot, match.known)

    def reserve(self, slot: int, tokens: int) -> None:
        """Make room for the first `tokens` tokens of a running sequence in its slot; evict cached ones if necessary."""
        self._needed[slot] = tokens
        if tokens > self._resident[slot]:
            self._set_resident(slot, tokens)
            if self._resident_tokens > self.kv_tokens:
                self._give_way()

    def set_computed(self, slot: int, tokens: int) -> None:
        """Record that the first `tokens` tokens of a running sequence are in its slot."""
        self._running[slot] = tokens

    def begin_anew(self, slot: int, adapter: Hashable, tokens: list[int]) -> None:
        """Record that nothing of a running sequence is in its slot any more, and that its tokens are `tokens`."""
        self._running[slot] = self._needed[slot] = 0
        self._tree.remove(slot)
        self._tree.insert(slot, adapter, tokens)

    def release(self, slot: int, adapter: Hashable, tokens: list[int]) -> None:
        """Take the slot back from a sequence that leaves; the computed part of its `tokens` stays cached."""
        held = self._running.pop(slot)
        if self.states is not None:
            self.states.release(slot, held) if held else self.states.discard(slot)
        self._tree.remove(slot)
        self._needed[slot] = held
        if held:
            self._tree.insert(slot, adapter, tokens[:held])
            self._cached[slot] = held
        else:
            self._empty[slot] = None

    def discard(self, slot: int) -> None:
        """Take the slot back from a sequence whose keys and values may be wrong."""
        self._running[slot] = 0
        self.release(slot, None, [])

    def forget(self, adapter: Hashable) -> None:
        """Drop what is cached of a removed adapter."""
        for slot in self._tree.slots_of(adapter) & self._cached.keys():
            self._forget(slot)

    def step_planned(self) -> tuple[list[SlotTrim], list[SlotCopy]]:
        """Return what the planned step has to do before it computes, trims first; forget it here."""
        done = self.trims, self.copies
        self.trims, self.copies = [], []
        return done

    # --- which slot a newcomer gets ---

    def _choose(self, tokens: list[int], match: Match, spare: int) -> tuple[int | None, int]:
        """Return a slot for `tokens`, and how many of them it holds already if it is the matching slot itself."""
        sources = {copy.source for copy in self.copies}
        useful = match.tokens >= _MIN_COPIED
        if len(tokens) > spare - self._cached_in(sources):
            return None, 0  # the sources of this step's copies must stay until they are copied
        room = spare - self._cached_in(sources | ({match.slot} if useful else set()))
        if useful and match.slot in self._cached and match.slot not in sources:
            lost = self._cached[match.slot] - match.tokens
            if lost <= _TAIL_WORTH_KEEPING or len(tokens) > room or not self._others(sources | {match.slot}):
                return match.slot, match.tokens
        if len(tokens) > room:
            return None, 0
        return self._vacant(len(tokens), sources | ({match.slot} if useful else set())), 0

    def _cached_in(self, slots: set[int]) -> int:
        return sum(self._cached.get(slot, 0) for slot in slots)

    def _others(self, slots: set[int]) -> bool:
        """Whether a slot other than `slots` could be taken."""
        return bool(self._empty) or any(slot not in slots for slot in self._cached)

    def _vacant(self, tokens: int, pinned: set[int]) -> int | None:
        """Return a slot whose content is not needed: if possible one with memory behind it, else an evicted one."""
        with_memory = max(self._empty, key=lambda slot: self._resident[slot], default=None)
        if with_memory is not None and self._resident[with_memory] > 0:
            return with_memory
        evictable = next(self._victims(pinned), None)
        short = self._resident_tokens + tokens > self.kv_tokens
        if evictable is not None and (short or with_memory is None):
            self._forget(evictable)
            return evictable
        return with_memory

    def _usable(self, slot: int, tokens: int) -> int:
        """Return up to how many of the first `tokens` tokens of a slot another sequence can continue from."""
        return tokens if self.states is None else self.states.longest(slot, tokens)

    def _held(self, slot: int) -> int:
        return self._cached[slot] if slot in self._cached else self._running[slot]

    def _fitness(self, slot: int) -> tuple[bool, int]:
        """Return a key that is greatest for the slot in which a sequence continues at the least loss."""
        return slot in self._cached, -self._held(slot)

    def _touch(self, slot: int) -> None:
        if slot in self._cached:
            self._cached[slot] = self._cached.pop(slot)

    # --- memory ---

    def _set_resident(self, slot: int, tokens: int) -> None:
        self._resident_tokens += tokens - self._resident[slot]
        self._resident[slot] = tokens

    def _give_way(self) -> None:
        """Bring the resident tokens down to the limit: trim unneeded memory first, then evict cached tokens."""
        for slot, needed in enumerate(self._needed):
            if self._resident[slot] > needed:
                self._trim(slot, needed)
                if self._resident_tokens <= self.kv_tokens:
                    return
        pinned = {copy.source for copy in self.copies}
        for slot in self._victims(pinned):
            held = self._cached[slot]
            short = max(self._resident_tokens - self.kv_tokens, _MIN_EVICTED)
            self._shorten(slot, 0 if self._is_copy(slot) else held - short)
            if self._resident_tokens <= self.kv_tokens:
                return
        raise AssertionError("the scheduler planned for more memory than there is")

    def _victims(self, pinned: set[int]) -> Iterator[int]:
        """Yield the cached slots to evict: near copies of others, then all, least recently used first."""
        slots = [slot for slot in self._cached if slot not in pinned]
        yield from (slot for slot in slots if self._is_copy(slot))
        yield from (slot for slot in slots if slot in self._cached)

    def _is_copy(self, slot: int) -> bool:
        """Whether other slots hold all but a small part of a cached slot now, or nothing of it is of use."""
        held = self._cached[slot]
        if not self._usable(slot, held):
            return True
        depth, others = self._tree.shared(slot)
        return held - max((min(depth, self._held(other)) for other in others), default=0) <= held * _MAX_LOST

    def _shorten(self, slot: int, keep: int) -> None:
        keep = self._usable(slot, max(keep, 0))
        if keep < _MIN_KEPT:
            self._forget(slot)
            keep = 0
        else:
            self._tree.shorten(slot, keep)
            if self.states is not None:
                self.states.shorten(slot, keep)
            self._cached[slot] = keep
            self._needed[slot] = keep
        self._trim(slot, keep)

    def _forget(self, slot: int) -> None:
        """Empty a cached slot, but leave its memory behind it."""
        del self._cached[slot]
        if self.states is not None:
            self._hand_over(self.states, slot)
        self._tree.remove(slot)
        self._needed[slot] = 0
        self._empty[slot] = None

    def _hand_over(self, states: StateTable, slot: int) -> None:
        """Give the snapshots of a slot to another one that begins with the same tokens, as far as it does."""
        depth, others = self._tree.shared(slot)
        for other in others:
            states.move(slot, other, min(depth, self._held(other)))
        states.drop(slot)

    def _trim(self, slot: int, keep: int) -> None:
        self.trims.append(SlotTrim(slot, keep))
        self._set_resident(slot, keep)
