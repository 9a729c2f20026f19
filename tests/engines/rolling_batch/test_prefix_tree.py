"""The radix tree over the tokens of slots, compared with a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from handlers.rolling_batch.schedule.prefix_tree import PrefixTree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ADAPTERS = st.sampled_from([None, "a", "b"])


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(map(len, (one, other)))
    )


def test_a_longer_match_comes_first_and_adapters_share_nothing() -> None:
    tree = PrefixTree()
    tree.insert(0, None, [1, 2, 3, 4])
    tree.insert(1, None, [1, 2, 5])
    tree.insert(2, "a", [1, 2, 3, 4])
    assert tree.match(None, [1, 2, 3, 9]) == [(3, {0}), (2, {0, 1})]
    assert tree.match("a", [1, 2]) == [(2, {2})]
    assert tree.match("b", [1, 2]) == []
    tree.remove(0)
    assert tree.match(None, [1, 2, 3, 9]) == [(2, {1})]


@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("insert"), st.integers(0, 5), ADAPTERS, TOKENS),
            st.tuples(st.just("remove"), st.integers(0, 5)),
            st.tuples(st.just("shorten"), st.integers(0, 5), st.integers(1, 12)),
        ),
        max_size=30,
    ),
    adapter=ADAPTERS,
    wanted=TOKENS,
)
def test_it_finds_what_comparing_every_slot_finds(actions: list[tuple], adapter: str | None, wanted: list[int]) -> None:
    tree = PrefixTree()
    held: dict[int, tuple[str | None, list[int]]] = {}
    for action, slot, *more in actions:
        if action == "insert" and slot not in held:
            tree.insert(slot, more[0], list(more[1]))
            held[slot] = (more[0], more[1])
        elif action == "remove":
            tree.remove(slot)
            held.pop(slot, None)
        elif action == "shorten" and slot in held and more[0] < len(held[slot][1]):
            tree.shorten(slot, more[0])
            held[slot] = (held[slot][0], held[slot][1][: more[0]])
    assert dict(tree.paths()) == {slot: tokens for slot, (_, tokens) in held.items()}
    lengths = {slot: common(tokens, wanted) for slot, (key, tokens) in held.items() if key == adapter}
    for key in (None, "a", "b"):
        assert tree.slots_of(key) == {slot for slot, (own, _) in held.items() if own == key}
    found = tree.match(adapter, wanted)
    assert [depth for depth, _ in found] == sorted({depth for depth, _ in found}, reverse=True)
    assert all(slots == {slot for slot, length in lengths.items() if length >= depth} for depth, slots in found)
    assert (found[0][0] if found else 0) == max(lengths.values(), default=0)
