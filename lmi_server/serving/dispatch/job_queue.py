"""The job queue of one model: bounded, by priority, fair between API keys. Plain data: no I/O, no clock, no asyncio."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

from lmi_server.contract.errors import QueueFullError

_BY_PRIORITY = 9  # jobs leave by priority before the oldest one has its turn, so that none waits for ever


class Queueable(Protocol):
    """The fields of a job that the queue reads.

    Ids rise in the order in which jobs come. `priority`: lower leaves sooner. `tenant` identifies the API key, b""
    without keys.
    """

    id: int
    priority: int
    tenant: bytes


J = TypeVar("J", bound=Queueable)


class JobQueue(Generic[J]):
    """Jobs that wait for a worker with room.

    Within a priority the tenants take turns, and each tenant's jobs leave in the order in which they came. With one
    tenant that is first in, first out. While several priorities wait, every tenth job that leaves is the oldest of all.

    Adding and removing a job takes constant time in the number of jobs. There is an ordered dictionary for each
    priority and tenant in use, because it removes a job from its middle in constant time: clients that go away do so
    while their job waits.

    A lent job waits in a worker, and its scheduler chooses among all lent jobs. It counts as
    waiting here until it is removed. Jobs of one priority and tenant alone are lent,
    so that the scheduler's choice does not change whose turn it is.
    """

    def __init__(self, model_name: str, capacity: int) -> None:
        self._model_name = model_name
        self._capacity = capacity
        self._levels: dict[int, OrderedDict[bytes, OrderedDict[int, J]]] = {}  # jobs by priority, tenant and id
        self._priorities: list[int] = []  # sorted; exactly the keys of _levels
        self._left_by_priority = 0  # since the oldest job had its turn
        self._length = 0
        self._lent: dict[int, J] = {}
        self._lent_flow = (0, b"")  # priority and tenant of all that are lent

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[J]:
        """Yield every job that waits; the queue must not change meanwhile."""
        for tenants in self._levels.values():
            for flow in tenants.values():
                yield from flow.values()
        yield from self._lent.values()

    @property
    def has_next(self) -> bool:
        """Return whether `pop` would return a job: some wait that are not lent."""
        return bool(self._priorities)

    @property
    def lent(self) -> Collection[J]:
        """The lent jobs, oldest first."""
        return self._lent.values()

    @property
    def may_lend(self) -> bool:
        """Return whether the next job may be lent: none of another priority or tenant waits."""
        if len(self._priorities) != 1:
            return False
        priority = self._priorities[0]
        tenants = self._levels[priority]
        return len(tenants) == 1 and (not self._lent or self._lent_flow == (priority, next(iter(tenants))))

    def lend(self) -> J:
        """Return the next job, which goes on waiting elsewhere. `may_lend` says whether it may."""
        job = self.pop()
        self._length += 1
        self._lent[job.id] = job
        self._lent_flow = (job.priority, job.tenant)
        return job

    def overtakes_lent(self, job: J) -> bool:
        """Return whether `job` may have its turn before jobs that are lent."""
        if not self._lent:
            return False
        priority, tenant = self._lent_flow
        return job.priority < priority or (job.priority == priority and job.tenant != tenant)

    def push(self, job: J) -> J | None:
        """Add `job` behind those of its priority and tenant.

        If the queue is full, the newest job of the tenant with most jobs gives way and is returned, provided that the
        tenant of `job` has fewer even so. Otherwise raise QueueFullError.
        """
        loser = self._make_room(job.tenant) if self._length >= self._capacity else None
        self._flow(job)[job.id] = job
        self._length += 1
        return loser

    def push_front(self, job: J) -> None:
        """Put back a job that was accepted before, ahead of its priority, even if the queue is full."""
        flow = self._flow(job)
        flow[job.id] = job
        flow.move_to_end(job.id, last=False)
        self._levels[job.priority].move_to_end(job.tenant, last=False)
        self._length += 1

    def pop(self) -> J:
        """Remove and return the next job. Raises IndexError if none waits."""
        priority, tenant = self._next()
        if len(self._priorities) > 1:
            self._left_by_priority = (self._left_by_priority + 1) % (_BY_PRIORITY + 1)
        level = self._levels[priority]
        _, job = level[tenant].popitem(last=False)
        level.move_to_end(tenant)
        self._drop_empty(job)
        return job

    def peek(self) -> J:
        """Return the next job. Raises IndexError if none waits."""
        priority, tenant = self._next()
        return next(iter(self._levels[priority][tenant].values()))

    def remove(self, job: J) -> bool:
        """Remove `job`; return False if it does not wait here."""
        if self._lent.pop(job.id, None) is not None:
            self._length -= 1
            return True
        level = self._levels.get(job.priority)
        flow = None if level is None else level.get(job.tenant)
        if flow is None or flow.pop(job.id, None) is None:
            return False
        self._drop_empty(job)
        return True

    def ahead_of(self, job: J) -> int:
        """Return how many waiting jobs would leave before `job` if it came now and nothing came after it."""
        urgent = sum(self._waiting(priority).total() for priority in self._used_priorities() if priority < job.priority)
        level = self._waiting(job.priority)
        own = level.pop(job.tenant, 0)
        return urgent + own + sum(min(count, own + 1) for count in level.values())

    def _next(self) -> tuple[int, bytes]:
        """Return priority and tenant of the next job."""
        if self._left_by_priority == _BY_PRIORITY and len(self._priorities) > 1:
            return min(
                (next(iter(flow)), (priority, tenant))
                for priority, level in self._levels.items()
                for tenant, flow in level.items()
            )[1]
        priority = self._priorities[0]
        return priority, next(iter(self._levels[priority]))

    def _flow(self, job: J) -> OrderedDict[int, J]:
        level = self._levels.get(job.priority)
        if level is None:
            level = self._levels[job.priority] = OrderedDict()
            insort(self._priorities, job.priority)
        flow = level.get(job.tenant)
        if flow is None:
            flow = level[job.tenant] = OrderedDict()
        return flow

    def _drop_empty(self, job: J) -> None:
        """Drop empty entries now that `job` has been removed."""
        self._length -= 1
        level = self._levels[job.priority]
        if not level[job.tenant]:
            del level[job.tenant]
            if not level:
                del self._levels[job.priority]
                del self._priorities[bisect_left(self._priorities, job.priority)]

    def _make_room(self, newcomer: bytes) -> J:
        """Remove and return a job of the tenant with most jobs. Raises QueueFullError if none has more than its share.

        The newest of the tenant's least urgent jobs gives way, a lent one if all are.
        """
        levels = map(self._waiting, self._used_priorities()) if newcomer else ()
        waiting = sum(levels, Counter[bytes]())
        tenant = max(waiting, key=waiting.__getitem__, default=newcomer)
        if waiting[tenant] <= waiting[newcomer] + 1:
            raise QueueFullError(f"Worker queue capacity exceeded for model: {self._model_name}")
        priority = max((priority for priority, level in self._levels.items() if tenant in level), default=None)
        if priority is None:
            self._length -= 1
            return self._lent.popitem()[1]
        _, job = self._levels[priority][tenant].popitem()
        self._drop_empty(job)
        return job

    def _used_priorities(self) -> set[int]:
        return {*self._priorities, self._lent_flow[0]} if self._lent else set(self._priorities)

    def _waiting(self, priority: int) -> Counter[bytes]:
        """Return the number of waiting jobs of each tenant in a priority, with the lent ones."""
        waiting = Counter({tenant: len(flow) for tenant, flow in self._levels.get(priority, {}).items()})
        if self._lent and self._lent_flow[0] == priority:
            waiting[self._lent_flow[1]] += len(self._lent)
        return waiting
