"""The scheduler of the rolling batch: plain data in, plain data out."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import Batch, name_of, next_token, number_of, sequence

from handlers.rolling_batch.schedule.page_table import PageTable
from handlers.rolling_batch.schedule.plan import Sequence

# --- the batch ---


def test_a_sequence_without_a_token_to_compute_is_not_planned() -> None:
    """It would get the logits of the sequence before it in the pass."""
    batch = Batch()
    batch.add(sequence("a", 3))
    batch.scheduler.advance(batch.scheduler.plan())
    with pytest.raises(AssertionError, match="never appended"):
        batch.scheduler.plan()


def test_a_prompt_is_computed_at_once_while_nothing_decodes() -> None:
    batch = Batch()
    batch.add(sequence("a", 25))
    assert batch.step() == ([], [("a", 0, 25)])
    assert batch.step() == (["a"], [])


def test_a_long_prompt_is_cut_into_chunks_beside_decoding() -> None:
    batch = Batch()
    batch.add(sequence("a", 2))
    batch.step()
    batch.add(sequence("b", 25))
    assert [batch.step() for _ in range(4)] == [
        (["a"], [("b", 0, 10)]),
        (["a"], [("b", 10, 20)]),
        (["a"], [("b", 20, 25)]),
        (["a", "b"], []),
    ]


def test_a_chunk_is_filled_from_several_prompts() -> None:
    batch = Batch()
    batch.add(*(sequence(name, 15) for name in "abc"))
    assert batch.step() == ([], [("a", 0, 15), ("b", 0, 15), ("c", 0, 10)])
    assert batch.step() == (["a", "b"], [("c", 10, 15)])


def test_short_prompts_get_more_of_a_step_if_more_wait_than_decode() -> None:
    batch = Batch(max_running=11)
    batch.add(sequence("a", 2))
    batch.step()
    batch.add(*(sequence(name, 6) for name in "bcdefgh"))
    assert batch.step() == (["a"], [(name, 0, 6) for name in "bcdefg"] + [("h", 0, 4)])  # no more than an idle step
    batch.add(sequence("i", 6))
    assert batch.step() == ([*"abcdefg"], [("h", 4, 6), ("i", 0, 6)])
    batch.add(*(sequence(name, 9) for name in "jk"))
    assert batch.step()[1] == [("j", 0, 9), ("k", 0, 1)]  # two wait, and nine decode


def test_a_long_prompt_gets_a_chunk_of_any_step_beside_decoding() -> None:
    batch = Batch(max_running=9)
    batch.add(sequence("a", 2))
    batch.step()
    batch.add(sequence("b", 35), *(sequence(name, 6) for name in "cde"))
    assert batch.step() == (["a"], [("b", 0, 10), *((name, 0, 6) for name in "cde")])
    assert batch.step() == ([*"acde"], [("b", 10, 20)])


def test_places_bound_the_batch_and_are_given_back() -> None:
    batch = Batch(max_running=2)
    waiting = [sequence(name, 10) for name in "abc"]
    batch.add(*waiting)
    batch.step()
    assert batch.running == ["a", "b"]
    batch.scheduler.remove(waiting[0])
    batch.step()
    assert batch.running == ["b", "c"]
    batch.scheduler.remove(waiting[1])
    batch.scheduler.remove(waiting[2])
    assert (batch.running, batch.scheduler.waiting, batch.scheduler.slots._running) == ([], [], {})


def test_the_first_in_line_is_not_overtaken_by_a_smaller_one() -> None:
    batch = Batch(kv_tokens=30)
    batch.add(sequence("a", 20), sequence("big", 20), sequence("small", 1))
    batch.step()
    assert batch.running == ["a"]


def test_a_more_urgent_priority_waits_in_front_and_equals_stay_in_order() -> None:
    batch = Batch(max_running=1)
    for name, priority in (("a", 3), ("b", 3), ("urgent", 1), ("later", 5), ("c", 3)):
        batch.add(sequence(name, 1, priority=priority))
    assert [name_of(entry) for entry in batch.scheduler.waiting] == ["urgent", "a", "b", "c", "later"]


def test_what_could_never_be_admitted_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 34 tokens of KV cache, which holds 30"):
        Batch(kv_tokens=30).add(sequence("a", 30))


# --- prefix reuse ---


def test_a_prefix_of_a_running_sequence_is_copied() -> None:
    batch = Batch(chunk=100, idle_chunk=100)
    first = sequence("a", [*range(50), 7], new=50)
    batch.add(first)
    batch.step()
    second = sequence("b", [*range(50), 8, 8, 8])
    batch.add(second)
    assert batch.step() == (["a"], [("b", 50, 53)])
    assert [(copy.source, copy.target, copy.tokens) for copy in batch.plan.copies] == [(first.slot, second.slot, 50)]
    assert (first.cached, second.cached) == (0, 50)


def test_a_conversation_goes_on_in_the_slot_of_its_last_turn() -> None:
    batch = Batch()
    first = sequence("a", 20)
    batch.add(first)
    batch.run()
    second = sequence("b", [*first.tokens, 2, 2])
    batch.add(second)
    assert batch.step() == ([], [("b", 24, 27)])
    assert batch.plan.copies == []
    assert second.cached == 24


def test_what_a_finished_sequence_goes_on_with_is_kept_by_a_copy() -> None:
    batch = Batch()
    first = sequence("a", 60)
    batch.add(first)
    batch.run()
    second = sequence("b", [*first.tokens[:30], 9, 9])
    batch.add(second)
    batch.run()
    assert second.cached == 30
    third = sequence("c", [*first.tokens, 9])
    batch.add(third)
    batch.run()
    assert third.cached == 64


def test_the_whole_prompt_again_leaves_its_last_token_to_compute() -> None:
    batch = Batch()
    batch.add(sequence("a", list(range(30))))
    batch.run()
    batch.add(sequence("b", list(range(30))))
    assert batch.step() == (["b"], [])


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_requests_that_arrive_with_one_prefix_wait_for_the_first_to_compute_it(policy: str) -> None:
    batch = Batch(max_running=8, chunk=40, idle_chunk=40, policy=policy)
    prefix = list(range(100))
    batch.add(*(sequence(str(index), [*prefix, 200 + index]) for index in range(4)), sequence("other", 3))
    chunks = []
    while batch.scheduler.running or batch.scheduler.waiting:
        chunks += batch.step()[1]
    assert chunks == [("0", 0, 40), ("0", 40, 80), ("0", 80, 101), ("other", 0, 3)]


def test_a_request_that_waits_for_a_prefix_computes_it_if_the_first_is_aborted() -> None:
    batch = Batch(chunk=10, idle_chunk=10)
    first, second = (sequence(name, [*range(100), last]) for name, last in (("a", 1), ("b", 2)))
    batch.add(first, second)
    batch.step()
    assert batch.running == ["a"]
    batch.scheduler.remove(first)
    assert batch.step() == ([], [("b", 10, 20)])


def test_another_adapter_reuses_nothing() -> None:
    batch = Batch()
    first, second = (sequence(name, list(range(20)), adapter=name) for name in "ab")
    batch.add(first)
    batch.run()
    batch.add(second)
    batch.run()
    assert second.cached == 0
    running = sequence("running", list(range(20)), adapter="b")
    batch.add(running)
    batch.step()
    batch.scheduler.forget("b")
    batch.run()
    third, fourth = (sequence(name, list(range(20)), adapter=name) for name in "ab")
    batch.add(third, fourth)
    batch.run()
    assert (running.cached, third.cached, fourth.cached) == (19, 19, 0)


def test_a_sequence_that_must_be_computed_in_full_reuses_nothing_and_gives_to_others() -> None:
    batch = Batch()
    batch.add(sequence("a", list(range(20))))
    batch.run()
    scored = sequence("b", [*range(20), 5, 5, 5, 5, 5, 5], may_reuse_prefix=False)
    batch.add(scored)
    batch.run()
    last = sequence("c", [*scored.tokens])
    batch.add(last)
    batch.run()
    assert (scored.cached, last.cached) == (0, len(scored.tokens) - 1)


def test_what_a_failed_step_left_is_not_reused() -> None:
    batch = Batch()
    failed = sequence("a", list(range(20)))
    batch.add(failed)
    batch.step()
    batch.scheduler.remove(failed, sound=False)
    again = sequence("b", list(range(20)))
    batch.add(again)
    batch.step()
    assert again.cached == 0


def test_the_longest_match_comes_first_under_lpm_only() -> None:
    for policy, order in (("lpm", ["b", "a"]), ("fcfs", ["a", "b"])):
        batch = Batch(max_running=1, policy=policy)
        batch.add(sequence("before", list(range(50))))
        batch.run()
        batch.add(sequence("a", 30), sequence("b", [*range(50), 7]))
        started = []
        while batch.scheduler.waiting:
            batch.step()
            started += [name for name in batch.running if name not in started]
        assert started == order


def test_lpm_starves_no_request() -> None:
    batch = Batch(max_running=1, policy="lpm")
    shared = list(range(50))
    batch.add(sequence("before", shared))
    batch.run()
    lonely = sequence("lonely", 30)
    batch.add(lonely)
    for index in range(5):
        batch.add(sequence(f"shared {index}", [*shared, index]))
        while batch.scheduler.running or len(batch.scheduler.waiting) > 1:
            batch.step()
        if lonely.slot >= 0 or lonely not in batch.scheduler.waiting:
            break
    else:
        pytest.fail("five others were admitted before it")


def test_the_least_recently_used_is_evicted_first() -> None:
    batch = Batch(kv_tokens=300, max_running=2, slots=8, chunk=100, idle_chunk=100)
    for name in ("old", "new"):
        batch.add(sequence(name, 100))
        batch.run()
    batch.add(sequence("big", 180))
    batch.run()
    assert batch.resident <= 300
    again = [sequence("new", 100), sequence("old", 100)]
    batch.add(again[0])
    batch.run()
    assert again[0].cached == 99
    batch.add(again[1])
    batch.run()
    assert again[1].cached == 0


def test_copies_of_one_prefix_displace_no_other_prefix() -> None:
    batch = Batch(kv_tokens=1000, max_running=2, slots=18, chunk=100, idle_chunk=300)
    prefixes = {name: [hash(name)] * 200 for name in ("rare", "hot")}
    cached = []
    for index, name in enumerate(["rare", *["hot"] * 8, "rare"]):
        entry = sequence(str(index), [*prefixes[name], *range(100 * index, 100 * index + 30)])
        batch.add(entry)
        batch.run()
        cached.append(entry.cached)
    assert cached == [0, 0, *[200] * 8]
    assert batch.resident <= 1000


# --- memory ---


def test_admission_expects_a_part_of_the_output_and_retraction_corrects_it() -> None:
    batch = Batch(kv_tokens=110, max_running=8)
    entries = [sequence(str(index), 10, new=60) for index in range(4)]
    batch.add(*entries)
    batch.step()
    assert len(batch.running) == 2, "2 * (10 + 0.7 * 60) is what fits into 110, 3 of them do not"
    batch.run()
    assert batch.retracted >= 1
    assert all(entry.generated == 60 for entry in entries)
    assert [entry.cached for entry in entries] == [0] * 4


def test_a_conservative_scheduler_admits_what_surely_fits_and_never_retracts() -> None:
    counts = {}
    for conservativeness in (0.3, 1.0, 1.5):
        batch = Batch(kv_tokens=200, max_running=8, conservativeness=conservativeness)
        batch.add(*(sequence(str(index), 10, new=60) for index in range(8)))
        batch.step()
        first = len(batch.running)
        batch.run()
        counts[conservativeness] = (first, batch.retracted)
    assert counts[0.3][0] > counts[1.0][0] > counts[1.5][0] == 2
    assert counts[0.3][1] > 0


def test_the_newest_of_the_least_urgent_is_retracted() -> None:
    batch = Batch(kv_tokens=120, max_running=8, conservativeness=0.1)
    entries = [sequence(name, 10, new=100, priority=priority) for name, priority in (("a", 3), ("late", 5), ("b", 3))]
    batch.add(*entries)
    batch.step()
    assert batch.running == ["a", "b", "late"]
    order = []
    while batch.scheduler.waiting or batch.scheduler.running:
        batch.step()
        if batch.plan.retraction:
            order += [name_of(entry) for entry in batch.plan.retraction.sequences]
    assert order[:2] == ["late", "b"]
    assert "a" not in order


# --- pages ---


def test_sequences_share_the_pages_that_are_full_of_their_common_tokens() -> None:
    batch = Batch(page=4)
    common = list(range(10))
    batch.add(sequence("a", [*common, 50], new=20))
    batch.step()
    first = list(batch.tables[0])
    batch.add(sequence("b", [*common, 60, 61], new=20))
    batch.step()
    assert batch.tables[1][:2] == first[:2]
    assert batch.tables[1][2] not in first, "the page where they part is copied, or computed"
    assert batch.scheduler.slots.room == 250 - len(first) - 1


def test_a_page_is_copied_only_if_enough_of_it_is_common() -> None:
    for common, copied in ((10, 0), (14, 1)):
        batch = Batch(page=8)
        batch.add(sequence("a", [*range(common), 50]))
        batch.step()
        batch.add(sequence("b", [*range(common), 60, 61]))
        batch.step()
        assert batch.copied == copied
        batch.run()


def test_more_sequences_run_on_shared_pages_than_copies_would_fit() -> None:
    batch = Batch(max_running=8, kv_tokens=240, page=8, chunk=200, idle_chunk=200)
    common = list(range(96))
    batch.add(sequence("first", [*common, 200], new=8))
    batch.step()
    batch.add(*(sequence(str(index), [*common, 100 + index], new=8) for index in range(7)))
    batch.step()
    assert len(batch.running) == 8
    batch.run()
    assert batch.retracted == 0


def test_pages_of_finished_sequences_are_reused_until_they_are_needed() -> None:
    batch = Batch(kv_tokens=64, page=8)
    old, new = sequence("old", 20, new=2), sequence("new", 20, new=2)
    for entry in (old, new):
        batch.add(entry)
        batch.run()
    again = sequence("again", [*new.tokens], new=2)
    batch.add(again)
    batch.run()
    assert again.cached == len(new.tokens) - 1
    batch.add(sequence("large", 40, new=2))
    batch.run()
    match = batch.scheduler.slots.find(None, old.tokens)
    assert match.tokens < 16, "the least recently used one goes first"
    assert batch.scheduler.slots.find(None, again.tokens).tokens > match.tokens


def test_a_prompt_that_comes_again_and_again_is_cached_once() -> None:
    batch = Batch(page=8)
    for _ in range(50):
        batch.add(sequence("same", list(range(30)), new=4))
        batch.run()
    memory = batch.scheduler.slots
    assert isinstance(memory, PageTable)
    assert len(memory._owners.cached) == 1
    assert memory.cached_tokens <= 40


def test_a_failed_step_leaves_no_copy_to_be_made_into_pages_of_others() -> None:
    batch = Batch(page=8)
    batch.add(sequence("a", [*range(14), 50], new=20))
    batch.step()
    b = sequence("b", [*range(14), 60], new=20)
    batch.add(b)
    batch.scheduler._admit()  # as far as planning comes before it fails
    batch.scheduler.remove(b, sound=False)
    assert batch.scheduler.plan().pages.copies == []


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # the shared prefix that it begins with
        st.integers(0, 40),  # how many tokens of it
        st.integers(1, 20),  # tokens of its own
        st.integers(1, 25),  # tokens to generate
        st.sampled_from([None, None, None, "adapter"]),
        st.sampled_from([3, 3, 3, 1]),
        st.integers(0, 12),  # steps before it arrives
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10)),  # steps before it is aborted
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=3 * settings().max_examples)
@given(
    requests=REQUESTS,
    max_running=st.integers(1, 5),
    further_slots=st.integers(0, 4),
    kv_tokens=st.integers(85, 260),
    chunk=st.integers(1, 30),
    policy=st.sampled_from(["lpm", "fcfs"]),
    conservativeness=st.sampled_from([0.05, 0.3, 1.0, 2.0]),
    snapshots=st.sampled_from([None, 0, 1, 4]),
    seed=st.integers(0, 5),
    page=st.sampled_from([0, 0, 1, 4, 8]),
)
def test_everything_ends_within_the_memory(
    requests: list[tuple[Any, ...]],
    max_running: int,
    further_slots: int,
    kv_tokens: int,
    chunk: int,
    policy: Any,
    conservativeness: float,
    snapshots: int | None,
    seed: int,
    page: int,
) -> None:
    """`Batch` checks that every row is computed over the sequence's own tokens; this test, that all sequences end.

    `snapshots` are states that there is room for beside those of running sequences; None: layers keep no states.
    """
    prefixes = [[random.Random(index).randrange(3) for _ in range(40)] for index in range(4)]
    chance = random.Random(seed)
    slots = max_running + further_slots
    rows = 0 if snapshots is None else max_running + snapshots
    more = {"slots": slots, "policy": policy, "conservativeness": conservativeness, "state_rows": rows, "page": page}
    batch = Batch(max_running, kv_tokens + page, chunk, chunk, **more)
    memory = batch.scheduler.slots
    arrivals: list[tuple[int, Sequence, int | None]] = []
    for index, (prefix, shared, own, new, adapter, priority, after, aborted) in enumerate(requests):
        tokens = prefixes[prefix][:shared] + [chance.randrange(3) for _ in range(own)]
        entry = Sequence(number_of(str(index)), tokens, len(tokens), new, priority, adapter)
        entry.may_reuse_prefix = chance.random() < 0.9
        arrivals.append((after, entry, None if aborted is None else after + aborted))
    prompts = {entry: list(entry.tokens) for _, entry, _ in arrivals}
    aborted_ones = set()
    for step in range(5000):
        for after, entry, abort in arrivals:
            if after == step:
                batch.add(entry)
            live = entry.generated < entry.max_new_tokens
            if abort == step and live:
                batch.scheduler.remove(entry)
                aborted_ones.add(entry)
        if step > 30 and not batch.scheduler.waiting and not batch.scheduler.running:
            break
        decoding, chunks = batch.step()
        assert len(batch.running) <= max_running
        if isinstance(memory, PageTable):
            memory.check()
        else:
            assert batch.resident <= memory._contents.resident_tokens <= kv_tokens
        assert sum(end - start for _, start, end in chunks) <= chunk
        assert len(set(decoding) | {name for name, _, _ in chunks}) == len(decoding) + len(chunks)
    else:
        pytest.fail("not everything ended")
    for _, entry, _ in arrivals:
        if entry not in aborted_ones:
            expected = prompts[entry]
            while len(expected) < entry.prompt_len + entry.max_new_tokens:
                expected.append(next_token(expected))
            assert entry.tokens == expected
    assert not memory._running
    if isinstance(memory, PageTable):
        assert memory.room * page == memory.kv_tokens
        memory.forget(None)
        memory.forget("adapter")
        assert memory.cached_tokens == 0
