"""Which slots of the KV cache begin with which tokens: a radix tree (as in RadixAttention, Zheng et al., 2024).

Keys and values of a token depend on the tokens before it and on the weights alone. So slots whose tokens have a common
prefix, under the same adapter, have the same keys and values there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

EVERY: Final = object()
"""Stands for every adapter, and for none, where slots are looked up by their adapter."""


class _Node:
    """A run of tokens behind its parents' tokens; `slots` are all slots that hold it, with any continuation."""

    __slots__ = ("children", "parent", "slots", "tokens")

    def __init__(self, tokens: list[int], parent: _Node | None, slots: set[int]) -> None:
        self.tokens = tokens
        self.parent = parent
        self.slots = slots
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """Maps tokens to the slots that begin with them; a slot is in it once at most, under an adapter (None for none)."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node] = {}
        self._ends: dict[int, _Node] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._ends

    def insert(self, slot: int, adapter: Hashable, tokens: list[int]) -> None:
        """Add a slot with its `tokens`, at least one. The slot must not be in the tree."""
        self._grow(slot, self._roots.setdefault(adapter, _Node([], None, set())), tokens)

    def remove(self, slot: int) -> None:
        """Take a slot out of the tree, if it is in it."""
        node = self._ends.pop(slot, None)
        while node is not None and node.parent is not None:
            upper = node.parent
            _leave(node, slot)
            node = upper
        if node is not None and not node.children:  # no slot holds anything of this adapter any more
            self._roots = {adapter: root for adapter, root in self._roots.items() if root is not node}

    def slots_of(self, adapter: Hashable) -> set[int]:
        """Return the slots whose tokens were computed with `adapter`."""
        if adapter is EVERY:
            return set(self._ends)
        root = self._roots.get(adapter)
        return set().union(*(child.slots for child in root.children.values())) if root else set()

    def shorten(self, slot: int, length: int) -> None:
        """Reduce a slot to its first `length` tokens: at least one, and fewer than it holds."""
        node = self._ends[slot]
        begin = sum(len(above.tokens) for above in _above(node))
        while begin >= length:
            assert node.parent is not None
            upper = node.parent
            _leave(node, slot)
            node = upper
            begin -= len(node.tokens)
        if begin + len(node.tokens) > length:
            lower, node = node, _split(node, length - begin)
            _leave(lower, slot)
        self._ends[slot] = node

    def shared(self, slot: int) -> tuple[int, set[int]]:
        """Return how many of a slot's tokens other slots begin with at most, and the slots that begin with so many."""
        end = self._ends[slot]
        depth = sum(len(node.tokens) for node in (end, *_above(end)))
        for node in (end, *_above(end)):
            if len(node.slots) > 1:
                return depth, node.slots - {slot}
            depth -= len(node.tokens)
        return 0, set()

    def match(self, adapter: Hashable, tokens: list[int]) -> list[tuple[int, set[int]]]:
        """Return pairs of a length and the slots that begin with so many of `tokens`, the greatest length first.

        The slots of a pair are also among those of every later pair.
        """
        found = []
        node, depth = self._roots.get(adapter), 0
        while node is not None and depth < len(tokens):
            node = node.children.get(tokens[depth])
            if node is None:
                break
            common = _common(node.tokens, tokens, depth)
            depth += common
            found.append((depth, node.slots))
            if common < len(node.tokens):
                break
        return found[::-1]

    def paths(self) -> Iterator[tuple[int, list[int]]]:
        """Yield every slot with its tokens. Tests compare them with what they put in."""
        for slot, end in self._ends.items():
            runs = [end.tokens, *(node.tokens for node in _above(end))]
            yield slot, [token for run in reversed(runs) for token in run]

    def _grow(self, slot: int, node: _Node, tokens: list[int]) -> None:
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = _Node(tokens[at:], node, set())
            common = _common(child.tokens, tokens, at)
            if common < len(child.tokens):
                child = _split(child, common)
            child.slots.add(slot)
            node = child
            at += common
        self._ends[slot] = node


def _above(node: _Node) -> Iterator[_Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _leave(node: _Node, slot: int) -> None:
    """Take a slot out of a node, and the node out of the tree if it has no other slot."""
    assert node.parent is not None
    node.slots.discard(slot)
    if not node.slots:
        del node.parent.children[node.tokens[0]]


def _split(node: _Node, length: int) -> _Node:
    """Split a node's run after `length` tokens; return the new node, which has the first part."""
    assert node.parent is not None
    upper = _Node(node.tokens[:length], node.parent, set(node.slots))
    node.parent.children[upper.tokens[0]] = upper
    node.tokens = node.tokens[length:]
    node.parent = upper
    upper.children[node.tokens[0]] = node
    return upper


def _common(run: list[int], tokens: list[int], start: int) -> int:
    """Return the length of the common prefix of `run` and `tokens[start:]`.

    Comparing slices by bisection is much faster than a loop over tokens: most runs are equal, and long.
    """
    most = min(len(run), len(tokens) - start)
    if run[:most] == tokens[start : start + most]:
        return most
    least = 0
    while most - least > 1:  # the first `least` are equal, the first `most` are not
        middle = (least + most) // 2
        if run[least:middle] == tokens[start + least : start + middle]:
            least = middle
        else:
            most = middle
    return least
