"""The workers of one model by what they do: some take requests, some only finish theirs, and others do neither."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
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
        self.numbers: dict[WorkerProcess, int] = {}  # no two workers have the same

    @property
    def serving(self) -> list[WorkerProcess]:
        """Return the workers that may hold requests."""
        return [*self.ready, *self.leaving]

    @property
    def in_flight(self) -> int:
        """Return how many requests have a place in a worker."""
        return sum(worker.requests.running for worker in self.serving)

    @property
    def everyone(self) -> list[WorkerProcess]:
        return list(self.numbers)

    @property
    def ready_workers(self) -> int:
        return len(self.ready)

    @property
    def states(self) -> Mapping[str, int]:
        """Return how many workers take requests, only finish theirs, or do neither (yet, or any more)."""
        ready, leaving = len(self.ready), len(self.leaving)
        return {"ready": ready, "leaving": leaving, "starting": len(self.numbers) - ready - leaving}

    @property
    def pids(self) -> dict[str, int]:
        """Return the process of each worker on this machine, by the worker's name."""
        return {worker.name: worker.pid for worker in self.numbers if worker.is_local and worker.pid}

    @property
    def gauges(self) -> dict[str, Mapping[str, float]]:
        """Return the gauges that each ready worker last reported, by the worker's name."""
        return {worker.name: worker.gauges for worker in self.ready}

    @property
    def loading(self) -> WorkerProcess | None:
        """Return a worker of this machine that loads the model, best one that says how far it is; None if none does."""
        loading = [worker for worker in self.numbers if worker.is_local and worker.is_loading]
        return next((worker for worker in loading if worker.loading is not None), next(iter(loading), None))

    def free_number(self) -> int:
        """Return the lowest number that no worker has."""
        taken = {*self.numbers.values(), *self._reserved}
        return next(number for number in itertools.count() if number not in taken)

    def remove(self, worker: WorkerProcess) -> None:
        """Remove a worker whose process is reaped."""
        del self.numbers[worker]

    def leave(self, worker: WorkerProcess) -> bool:
        """Give `worker` no more requests; return False if it took none."""
        if worker not in self.ready:
            return False
        self.ready.remove(worker)
        self.leaving.add(worker)
        return True

    def drop(self, worker: WorkerProcess) -> None:
        """Take a worker that is dead, or is being stopped, out of service."""
        if worker in self.ready:
            self.ready.remove(worker)
        self.leaving.discard(worker)

    def kill(self) -> None:
        """End the workers at once, whatever they do."""
        for worker in self.everyone:
            worker.kill()
