from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_server.contract.errors import QueueFullError
from lmi_server.serving.job_queue import JobQueue


@dataclass
class Job:
    id: int
    priority: int = 3


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


@given(st.lists(st.tuples(st.sampled_from(["push", "front", "pop", "remove"]), st.integers(-2, 2), st.integers(0, 30))))
def test_it_behaves_like_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    queue: JobQueue[Job] = JobQueue("model", 8)
    expected: list[Job] = []
    for number, (operation, priority, choice) in enumerate(operations):
        job = Job(number, priority)
        if operation == "push" and len(expected) < 8:
            queue.push(job)
            expected.insert(sum(other.priority <= priority for other in expected), job)
        elif operation == "front":
            queue.push_front(job)
            expected.insert(sum(other.priority < priority for other in expected), job)
        elif operation == "pop" and expected:
            assert queue.pop() is expected.pop(0)
        elif operation == "remove" and expected:
            assert queue.remove(expected.pop(choice % len(expected)))
        assert len(queue) == len(expected)
    assert drained(queue) == [job.id for job in expected]
