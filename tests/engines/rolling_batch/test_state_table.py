"""Snapshots of the states of recurrent layers: what a sequence may continue from, in the room that there is."""

from __future__ import annotations

from scheduler_helpers import Batch, sequence

ROOM = {"max_running": 4, "state_rows": 12, "slots": 8}
PREFIX = list(range(100, 160))


def computed(batch: Batch, name: str, prompt: list[int], new: int = 5) -> int:
    """Run one sequence to its end; return how many tokens of its prompt were computed."""
    entry = sequence(name, prompt, new)
    batch.add(entry)
    batch.run()
    return entry.prompt_len - entry.cached


def test_a_conversation_goes_on_from_the_state_that_its_last_turn_left() -> None:
    batch = Batch(**ROOM)
    first = sequence("first", PREFIX, 5)
    batch.add(first)
    batch.run()
    assert computed(batch, "second", [*first.tokens, 1, 2, 3]) == 4  # the last output token was never computed


def test_a_prefix_is_reused_from_the_third_request_on_if_no_chunk_ended_there() -> None:
    batch = Batch(**ROOM, idle_chunk=100)
    assert computed(batch, "first", [*PREFIX, *range(10)]) == 70
    assert computed(batch, "second", [*PREFIX, *range(20, 30)]) == 70
    assert computed(batch, "third", [*PREFIX, *range(30, 40)]) == 10


def test_the_end_of_a_chunk_is_a_place_to_continue_from() -> None:
    batch = Batch(**ROOM, idle_chunk=40)
    assert computed(batch, "first", [*PREFIX, *range(10)]) == 70
    assert computed(batch, "second", [*PREFIX, *range(20, 30)]) == 30


def test_requests_that_arrive_with_one_prefix_wait_for_a_snapshot_of_it() -> None:
    batch = Batch(**ROOM, idle_chunk=40)
    entries = [sequence(str(index), [*PREFIX, *range(10 * index, 10 * index + 10)]) for index in range(4)]
    batch.add(*entries)
    batch.run()
    assert [entry.prompt_len - entry.cached for entry in entries] == [70, 10, 10, 10]


def test_the_whole_prompt_again_continues_from_the_last_end_of_a_chunk() -> None:
    batch = Batch(**ROOM, idle_chunk=50)
    assert computed(batch, "first", PREFIX) == 60
    assert computed(batch, "again", PREFIX) == 10


def test_a_retracted_sequence_goes_on() -> None:
    batch = Batch(max_running=2, kv_tokens=40, state_rows=4, conservativeness=0.05)
    first, second = sequence("a", [1, *PREFIX[:10]], 20), sequence("b", [2, *PREFIX[:10]], 20)
    batch.add(first, second)
    batch.run()
    assert batch.retracted
    assert first.generated == second.generated == 20


def test_without_further_rows_nothing_is_kept_beside_running_sequences() -> None:
    batch = Batch(max_running=1, state_rows=1, slots=4, idle_chunk=40)
    assert computed(batch, "first", [*PREFIX, *range(10)]) == 70
    assert computed(batch, "second", [*range(30), *PREFIX]) == 90
    assert computed(batch, "third", [*PREFIX, *range(20, 30)]) == 70


def test_the_least_recently_used_snapshot_gives_way() -> None:
    batch = Batch(max_running=1, state_rows=3, slots=6, idle_chunk=200)
    talks = {}
    for name in ("a", "b"):
        talk = sequence(name, [ord(name), *PREFIX], 5)
        batch.add(talk)
        batch.run()
        talks[name] = talk.tokens
    assert computed(batch, "a2", [*talks["a"], 1]) == 2
    assert computed(batch, "c", [7, *PREFIX]) == 61
    assert computed(batch, "b2", [*talks["b"], 1]) == len(talks["b"]) + 1


def test_states_of_a_failed_step_are_not_continued_from() -> None:
    batch = Batch(**ROOM, idle_chunk=40)
    first = sequence("first", [*PREFIX, *range(10)])
    batch.add(first)
    batch.step()
    batch.scheduler.remove(first, sound=False)
    assert computed(batch, "second", [*PREFIX, *range(20, 30)]) == 70


def test_an_adapter_has_states_of_its_own() -> None:
    batch = Batch(**ROOM, idle_chunk=40)
    assert computed(batch, "first", [*PREFIX, *range(10)]) == 70
    other = sequence("other", [*PREFIX, *range(20, 30)], adapter="adapter")
    batch.add(other)
    batch.run()
    assert other.cached == 0
    batch.scheduler.forget("adapter")
    assert computed(batch, "third", [*PREFIX, *range(40, 50)]) == 30
