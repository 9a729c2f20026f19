"""The scheduler of the rolling batch: plain data in, plain data out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.rolling_batch.scheduler import Scheduler, SchedulerLimits, Sequence, advance


def scheduler(max_running: int = 4, kv_tokens: int = 1000, chunk: int = 10, idle_chunk: int = 40) -> Scheduler:
    return Scheduler(SchedulerLimits(max_running, kv_tokens, chunk, idle_chunk))


def sequence(name: str, prompt: int, new: int = 5, priority: int = 3) -> Sequence:
    return Sequence(name, [1] * prompt, prompt, new, priority)


def step(batch: Scheduler) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Run one step with a token for everyone whose logits it gives; return what was planned."""
    batch.admit()
    plan = batch.plan()
    planned = [s.request_id for s in plan.decode], [(c.sequence.request_id, c.start, c.end) for c in plan.prefill]
    advance(plan)
    for chosen in [*plan.decode, *(c.sequence for c in plan.prefill if c.completes_prompt)]:
        chosen.tokens.append(2)
    return planned


def test_a_prompt_is_computed_at_once_while_nothing_decodes() -> None:
    batch = scheduler()
    batch.add(sequence("a", 25))
    assert step(batch) == ([], [("a", 0, 25)])
    assert step(batch) == (["a"], [])


def test_a_long_prompt_is_cut_into_chunks_beside_decoding() -> None:
    batch = scheduler()
    batch.add(sequence("a", 2))
    step(batch)
    batch.add(sequence("b", 25))
    assert [step(batch) for _ in range(4)] == [
        (["a"], [("b", 0, 10)]),
        (["a"], [("b", 10, 20)]),
        (["a"], [("b", 20, 25)]),
        (["a", "b"], []),
    ]


def test_a_chunk_is_filled_from_several_prompts() -> None:
    batch = scheduler()
    for name in "abc":
        batch.add(sequence(name, 15))
    assert step(batch) == ([], [("a", 0, 15), ("b", 0, 15), ("c", 0, 10)])
    assert step(batch) == (["a", "b"], [("c", 10, 15)])


def test_slots_and_kv_tokens_bound_the_batch_and_are_given_back() -> None:
    batch = scheduler(max_running=2, kv_tokens=30)
    waiting = [sequence(name, 10) for name in "abc"]
    for entry in waiting:
        batch.add(entry)
    assert [s.request_id for s in batch.admit()] == ["a", "b"]
    batch.remove(waiting[0])
    assert [s.request_id for s in batch.admit()] == ["c"]
    for entry in waiting[1:]:
        batch.remove(entry)
    assert (batch.reserved_tokens, batch.running, list(batch.waiting)) == (0, [], [])


def test_the_first_in_line_is_not_overtaken_by_a_smaller_one() -> None:
    batch = scheduler(kv_tokens=30)
    for entry in (sequence("a", 20), sequence("big", 20), sequence("small", 1)):
        batch.add(entry)
    assert [s.request_id for s in batch.admit()] == ["a"]


def test_a_more_urgent_priority_waits_in_front_and_equals_stay_in_order() -> None:
    batch = scheduler(max_running=1)
    for name, priority in (("a", 3), ("b", 3), ("urgent", 1), ("later", 5), ("c", 3)):
        batch.add(sequence(name, 1, priority=priority))
    assert [s.request_id for s in batch.waiting] == ["urgent", "a", "b", "c", "later"]


def test_what_could_never_be_admitted_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 34 tokens of KV cache of 30"):
        scheduler(kv_tokens=30).add(sequence("a", 30))


@given(
    jobs=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=15),
    max_running=st.integers(1, 5),
    kv_tokens=st.integers(70, 200),
    chunk=st.integers(1, 30),
)
def test_every_token_is_computed_exactly_once_and_everything_ends(
    jobs: list[tuple[int, int]], max_running: int, kv_tokens: int, chunk: int
) -> None:
    batch = scheduler(max_running, kv_tokens, chunk, chunk)
    sequences = [sequence(str(index), prompt, new) for index, (prompt, new) in enumerate(jobs)]
    for entry in sequences:
        batch.add(entry)
    for _ in range(sum(prompt + new for prompt, new in jobs) + 1):
        before = {s.request_id: s.computed for s in sequences}
        decoding, chunks = step(batch)
        assert len(batch.running) <= max_running
        assert batch.reserved_tokens == sum(s.reserved for s in batch.running) <= kv_tokens
        assert sum(end - start for _, start, end in chunks) <= chunk
        assert all(start == before[name] for name, start, _ in chunks)
        assert len(set(decoding) | {name for name, _, _ in chunks}) == len(decoding) + len(chunks)
        for entry in list(batch.running):
            if len(entry.tokens) - entry.prompt_len == entry.max_new_tokens:
                batch.remove(entry)
    assert not batch.running
    assert not batch.waiting
    assert all(s.computed == s.reserved for s in sequences)
