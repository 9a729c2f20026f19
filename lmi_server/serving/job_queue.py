"""The job queue of one model: bounded, FIFO within a priority. Plain data: no I/O, no clock, no asyncio."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from lmi_server.contract.errors import QueueFullError


class Queueable(Protocol):
    """The fields of a job that the queue reads. `priority`: lower leaves sooner."""

    id: int
    priority: int


J = TypeVar("J", bound=Queueable)


class JobQueue(Generic[J]):
    """Jobs that wait for a worker with room. Every operation takes constant time in the number of jobs.

    There is an ordered dictionary for each priority in use, because it removes a job from its middle in constant time:
    clients that go away do so while their job waits.
    """

    def __init__(self, model_name: str, capacity: int) -> None:
        self._model_name = model_name
        self._capacity = capacity
        self._levels: dict[int, OrderedDict[int, J]] = {}
        self._priorities: list[int] = []  # sorted; exactly the keys of _levels
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, job: J) -> None:
        """Add `job` behind those of its priority. Raises QueueFullError if `capacity` jobs wait."""
        if self._length >= self._capacity:
            raise QueueFullError(f"Worker queue capacity exceeded for model: {self._model_name}")
        self._level(job.priority)[job.id] = job
        self._length += 1

    def push_front(self, job: J) -> None:
        """Put back a job that was accepted before, ahead of those of its priority, even if the queue is full."""
        level = self._level(job.priority)
        level[job.id] = job
        level.move_to_end(job.id, last=False)
        self._length += 1

    def pop(self) -> J:
        """Remove and return the next job. Raises IndexError if none waits."""
        priority = self._priorities[0]
        level = self._levels[priority]
        _, job = level.popitem(last=False)
        self._removed(priority, level)
        return job

    def peek(self) -> J:
        """Return the next job. Raises IndexError if none waits."""
        return next(iter(self._levels[self._priorities[0]].values()))

    def remove(self, job: J) -> bool:
        """Remove `job`; return False if it does not wait here."""
        level = self._levels.get(job.priority)
        if level is None or level.pop(job.id, None) is None:
            return False
        self._removed(job.priority, level)
        return True

    def _level(self, priority: int) -> OrderedDict[int, J]:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            insort(self._priorities, priority)
        return level

    def _removed(self, priority: int, level: OrderedDict[int, J]) -> None:
        self._length -= 1
        if not level:
            del self._levels[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
