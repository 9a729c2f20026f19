"""The workers of one model by what they do: those that take requests, those that only finish, and all the others."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess


class WorkerRoster:
    """Every worker of a model whose process is not reaped yet.

    `ready` take requests; `leaving` finish the ones that they hold and get no more. A worker that is in neither is
    being loaded, or is dead. No worker gets a number that is in `reserved`.
    """

    def __init__(self, reserved: Collection[int] = ()) -> None:
        self._reserved = reserved
        self.ready: list[WorkerProcess] = []
        self.leaving: set[WorkerProcess] = set()
        self._numbers: dict[WorkerProcess, int] = {}

    @property
    def serving(self) -> list[WorkerProcess]:
        """Return the workers that may hold requests."""
        return [*self.ready, *self.leaving]

    @property
    def everyone(self) -> list[WorkerProcess]:
        return list(self._numbers)

    @property
    def numbers(self) -> frozenset[int]:
        """Return the numbers that the workers have."""
        return frozenset(self._numbers.values())

    def number_of(self, worker: WorkerProcess) -> int:
        """Return the number of `worker`; no two workers have the same."""
        return self._numbers[worker]

    def free_number(self) -> int:
        """Return the lowest number that no worker has."""
        taken = {*self._numbers.values(), *self._reserved}
        return next(number for number in itertools.count() if number not in taken)

    def add(self, worker: WorkerProcess, number: int) -> None:
        """Add a worker that is about to be spawned."""
        self._numbers[worker] = number

    def remove(self, worker: WorkerProcess) -> None:
        """Remove a worker whose process is reaped."""
        del self._numbers[worker]

    def leave(self, worker: WorkerProcess) -> bool:
        """Give `worker` no more requests; return False if it took none."""
        if worker not in self.ready:
            return False
        self.ready.remove(worker)
        self.leaving.add(worker)
        return True

    def drop(self, workers: Iterable[WorkerProcess]) -> None:
        """Take dead workers, or those that are being stopped, out of service."""
        for worker in workers:
            if worker in self.ready:
                self.ready.remove(worker)
            self.leaving.discard(worker)
