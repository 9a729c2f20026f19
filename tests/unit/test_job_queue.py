from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import QueueFullError
from lmi_server.serving.dispatch.job_queue import JobQueue


@dataclass
class Job:
    id: int
    priority: int = 3
    tenant: bytes = b""


def queue_of(capacity: int, *tenants: str) -> JobQueue[Job]:
    """Return a queue in which a job of each tenant waits; their ids are 0, 1, ..."""
    queue: JobQueue[Job] = JobQueue("model", capacity)
    for number, tenant in enumerate(tenants):
        queue.push(Job(number, tenant=tenant.encode()))
    return queue


def drained(queue: JobQueue[Job]) -> list[int]:
    return [queue.pop().id for _ in range(len(queue))]


def test_jobs_of_one_priority_leave_in_the_order_in_which_they_came() -> None:
    queue: JobQueue[Job] = JobQueue("model", 10)
    for number in range(5):
        queue.push(Job(number))
    assert drained(queue) == [0, 1, 2, 3, 4]


def test_a_lower_priority_leaves_sooner() -> None:
    queue: JobQueue[Job] = JobQueue("model", 10)
    for number, priority in enumerate([3, 9, -1, 3, -1]):
        queue.push(Job(number, priority))
    assert drained(queue) == [2, 4, 0, 3, 1]


def test_a_full_queue_refuses_at_once() -> None:
    queue: JobQueue[Job] = JobQueue("model", 2)
    queue.push(Job(1))
    queue.push(Job(2, 0))
    with pytest.raises(QueueFullError, match="capacity exceeded for model: model") as raised:
        queue.push(Job(3))
    assert raised.value.retry_after == 1
    assert drained(queue) == [2, 1]


def test_a_job_that_comes_back_is_first_even_if_the_queue_is_full() -> None:
    queue: JobQueue[Job] = JobQueue("model", 1)
    queue.push(Job(1))
    queue.push_front(Job(2))
    assert len(queue) == 2
    assert drained(queue) == [2, 1]


def test_removing_a_job_that_does_not_wait_changes_nothing() -> None:
    queue: JobQueue[Job] = JobQueue("model", 5)
    queue.push(Job(1))
    assert not queue.remove(Job(2))
    assert not queue.remove(Job(1, priority=7))
    assert len(queue) == 1


def test_pop_of_an_empty_queue_raises() -> None:
    with pytest.raises(IndexError):
        JobQueue[Job]("model", 1).pop()


def test_every_tenth_job_is_the_oldest_of_all_so_that_none_starves() -> None:
    queue: JobQueue[Job] = JobQueue("model", 100)
    for number in range(3):
        queue.push(Job(number, priority=9))
    left = []
    for number in range(3, 40):  # more urgent jobs never cease to come
        queue.push(Job(number, priority=1))
        left.append(queue.pop().id)
    assert [left.index(number) for number in range(3)] == [9, 19, 29]
    assert [number for number in left if number > 2] == list(range(3, 37))


def test_the_oldest_is_not_served_out_of_turn_while_one_priority_waits() -> None:
    queue: JobQueue[Job] = JobQueue("model", 100)
    for number in range(30):
        queue.push(Job(number))
    assert drained(queue) == list(range(30))


def test_keys_take_turns_within_a_priority() -> None:
    queue = queue_of(10, "a", "a", "a", "a", "b", "b", "c")
    assert drained(queue) == [0, 4, 6, 1, 5, 2, 3]


def test_a_key_that_sends_one_request_after_the_other_waits_for_one_of_each_other_key() -> None:
    queue = queue_of(1000, *"a" * 100)
    left = []
    for number in range(100, 110):
        queue.push(Job(number, tenant=b"b"))
        left += [queue.pop().id, queue.pop().id]
    assert left == [entry for number in range(10) for entry in (number, number + 100)]


def test_priority_comes_before_the_turn_of_a_key() -> None:
    queue = queue_of(10, "a", "b")
    queue.push(Job(2, 1, b"a"))
    queue.push(Job(3, 1, b"a"))
    assert drained(queue) == [2, 3, 0, 1]


def test_a_full_queue_has_room_for_a_key_with_less_than_its_share() -> None:
    queue = queue_of(4, "a", "a", "a")
    queue.push(Job(3, 7, b"a"))
    assert queue.push(Job(4, tenant=b"b")) == Job(3, 7, b"a"), "the newest of the least urgent"
    assert queue.push(Job(5, tenant=b"b")) == Job(2, tenant=b"a")
    for tenant in (b"a", b"b"):
        with pytest.raises(QueueFullError):
            queue.push(Job(6, tenant=tenant))
    assert queue.push(Job(7, tenant=b"c")) is not None
    assert len(queue) == 4


def test_a_job_that_comes_back_is_the_first_of_all_keys() -> None:
    queue = queue_of(10, "a", "b")
    queue.push_front(Job(-2, tenant=b"b"))
    queue.push_front(Job(-1, tenant=b"b"))
    assert queue.peek().id == -1
    assert drained(queue) == [-1, 0, -2, 1]


def test_how_many_jobs_leave_before_one_that_comes_now() -> None:
    queue = queue_of(20, "a", "a", "a", "b")
    queue.push(Job(4, 1, b"a"))
    queue.push(Job(5, 9, b"a"))
    assert queue.ahead_of(Job(6, tenant=b"a")) == 5
    assert queue.ahead_of(Job(6, tenant=b"b")) == 4
    assert queue.ahead_of(Job(6, tenant=b"c")) == 3
    assert queue.ahead_of(Job(6, 1, b"c")) == 1
    assert queue.ahead_of(Job(6, 9, b"b")) == 6


def sooner(waiting: list[Job], left_by_priority: int) -> Job:
    """Return the job that leaves next."""
    return min(waiting, key=lambda job: job.id) if left_by_priority == 9 else waiting[0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "push", "front", "pop", "remove"]), st.integers(-2, 2), st.integers(0, 30)),
        max_size=200,
    )
)
def test_it_behaves_like_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    queue: JobQueue[Job] = JobQueue("model", 8)
    expected: list[Job] = []
    left_by_priority = 0
    for number, (operation, priority, choice) in enumerate(operations):
        job = Job(number, priority)
        if operation == "push" and len(expected) < 8:
            queue.push(job)
            expected.insert(sum(other.priority <= priority for other in expected), job)
        elif operation == "front":
            job = Job(-number, priority)  # it came before all that wait
            queue.push_front(job)
            expected.insert(sum(other.priority < priority for other in expected), job)
        elif operation == "pop" and expected:
            several = len({other.priority for other in expected}) > 1
            following = sooner(expected, left_by_priority)
            assert queue.peek() is following
            assert queue.pop() is following
            expected.remove(following)
            left_by_priority = (left_by_priority + 1) % 10 if several else left_by_priority
        elif operation == "remove" and expected:
            assert queue.remove(expected.pop(choice % len(expected)))
        assert len(queue) == len(expected)
        assert queue.ahead_of(job) == sum(other.priority <= priority for other in expected)


def test_a_lent_job_waits_here_until_it_is_removed() -> None:
    queue = queue_of(3, "a", "a", "b")
    assert not queue.may_lend, "the turns of two tenants are not the scheduler's"
    assert queue.pop().tenant == b"a"
    assert queue.pop().tenant == b"b"
    assert queue.may_lend
    lent = queue.lend()
    queue.push(Job(7, tenant=b"a"))
    queue.push(Job(8, tenant=b"b"))
    assert (len(queue), queue.has_next, list(queue.lent)) == (3, True, [lent])
    assert queue.ahead_of(Job(9, tenant=b"a")) == 3
    assert queue.ahead_of(Job(9, priority=2)) == 0
    with pytest.raises(QueueFullError):
        queue.push(Job(9, tenant=b"b"))
    assert queue.remove(lent)
    assert (len(queue), queue.remove(lent)) == (2, False)


def test_a_job_of_another_tenant_or_a_lower_priority_overtakes_what_is_lent() -> None:
    queue = queue_of(3, "a")
    assert not queue.overtakes_lent(Job(1, priority=0))
    queue.lend()
    overtaking = [Job(1, 3, b"a"), Job(1, 4, b"b"), Job(1, 3, b"b"), Job(1, 2, b"a")]
    assert [queue.overtakes_lent(job) for job in overtaking] == [False, False, True, True]


def test_a_lent_job_gives_way_if_its_tenant_has_no_other() -> None:
    queue = queue_of(3, "a", "a", "a")
    lent = [queue.lend() for _ in range(3)]
    assert queue.push(Job(4, tenant=b"b")) is lent[2]
    assert len(queue) == 3
