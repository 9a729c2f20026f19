"""What each slot of the KV cache holds, and how much memory is behind it: plain data, no tensors.

A slot belongs to a running sequence, or keeps the tokens of one that has left (cached), or is empty. If a slot begins
with the first tokens of a new sequence, the sequence continues there if the slot is free, or these tokens are copied to
another slot: copying costs about a hundredth of computing. Before the slots exceed the memory of `kv_tokens` tokens,
cached tokens are evicted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from handlers.rolling_batch.schedule.slot_contents import SlotContents, SlotTrim
from handlers.rolling_batch.schedule.state_table import StateTable

MIN_COPIED = 4  # tokens; computing fewer is as fast as copying
_TAIL_WORTH_KEEPING = 16  # cached tokens behind a match; for more of them the match is copied, not overwritten


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


def with_leader(best: Match, known: int, matches: list[tuple[int, set[int]]], computed: Mapping[int, int]) -> Match:
    """Add the running sequence that can still leave a snapshot of the longest prefix.

    `known` tokens were seen before; `computed` are the tokens of running sequences by slot.
    """
    for common, slots in matches:
        depth = min(common, known)
        leaders = [slot for slot in slots if computed.get(slot, depth) < depth]
        if leaders and depth > best.tokens:
            return Match(best.slot, best.tokens, depth, max(leaders, key=computed.__getitem__), known)
    return Match(best.slot, best.tokens, best.tokens, -1, known)


class SlotTable:
    """Slots 0 to `slots` - 1, which share the memory of `kv_tokens` tokens.

    `copies` collects what the next step copies before it computes. If layers keep states, `states` says up to which
    lengths a slot is of use to others.
    """

    def __init__(self, slots: int, kv_tokens: int, states: StateTable | None = None) -> None:
        self.kv_tokens = kv_tokens
        self.states = states
        self.copies: list[SlotCopy] = []
        self._contents = SlotContents(slots, kv_tokens, states)
        self._tree = self._contents.tree
        self._running = self._contents.running
        self._cached = self._contents.cached
        self._needed = self._contents.needed
        self._resident = self._contents.resident

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
        contents = self._contents
        matches = self._tree.match(adapter, tokens)
        for common, slots in matches:
            depth = min(common, len(tokens) - 1)
            longest = max(longest, depth)
            if depth <= best.tokens:
                break
            for slot in slots:
                held = contents.usable(slot, min(depth, contents.held(slot)))
                equal = held == best.tokens > 0
                if held > best.tokens or (equal and contents.fitness(slot) > contents.fitness(best.slot)):
                    best = Match(slot, held, longest)
        if self.states is None:
            return Match(best.slot, best.tokens, longest)
        return with_leader(best, longest, matches, self._running)

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
        self._contents.empty.pop(slot, None)
        self._cached.pop(slot, None)
        if slot != match.slot:
            held = match.tokens if match.tokens >= MIN_COPIED else 0
            if held:
                self.copies.append(SlotCopy(match.slot, slot, held))
                self._contents.touch(match.slot)
        if self.states is not None:
            self.states.claim(slot, match.slot if held else -1, held, match.known)
        self._tree.remove(slot)
        self._tree.insert(slot, adapter, tokens)
        self._running[slot] = held
        self._needed[slot] = 0
        self.reserve(slot, held)
        return slot, held

    def reserve(self, slot: int, tokens: int) -> None:
        """Make room for the first `tokens` tokens of a running sequence in its slot; evict cached ones if necessary."""
        contents = self._contents
        self._needed[slot] = tokens
        if tokens > self._resident[slot]:
            contents.set_resident(slot, tokens)
            if contents.resident_tokens > self.kv_tokens:
                contents.give_way({copy.source for copy in self.copies})

    def set_computed(self, slot: int, tokens: int) -> None:
        """Record that the first `tokens` tokens of a running sequence are in its slot."""
        self._running[slot] = tokens

    def begin_anew(self, slot: int, adapter: Hashable, tokens: list[int]) -> None:
        """Record that nothing of a running sequence is in its slot any more; its tokens are `tokens`."""
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
            self._contents.empty[slot] = None

    def discard(self, slot: int) -> None:
        """Take the slot back from a sequence whose keys and values may be wrong."""
        self._running[slot] = 0
        self.release(slot, None, [])

    def forget(self, adapter: Hashable) -> None:
        """Drop what is cached of a removed adapter."""
        for slot in self._tree.slots_of(adapter) & self._cached.keys():
            self._contents.forget(slot)

    def step_planned(self) -> tuple[list[SlotTrim], list[SlotCopy]]:
        """Return what the planned step has to do before it computes, trims first; forget it here."""
        done = self._contents.trims, self.copies
        self._contents.trims, self.copies = [], []
        return done

    # --- which slot a newcomer gets ---

    def _choose(self, tokens: list[int], match: Match, spare: int) -> tuple[int | None, int]:
        """Return a slot for `tokens`, and how many of them it holds already if it is the matching slot itself."""
        sources = {copy.source for copy in self.copies}
        useful = match.tokens >= MIN_COPIED
        if len(tokens) > spare - self._contents.cached_in(sources):
            return None, 0  # the sources of this step's copies must stay until they are copied
        room = spare - self._contents.cached_in(sources | ({match.slot} if useful else set()))
        if useful and match.slot in self._cached and match.slot not in sources:
            lost = self._cached[match.slot] - match.tokens
            if lost <= _TAIL_WORTH_KEEPING or len(tokens) > room or not self._contents.others(sources | {match.slot}):
                return match.slot, match.tokens
        if len(tokens) > room:
            return None, 0
        return self._contents.vacant(len(tokens), sources | ({match.slot} if useful else set())), 0
