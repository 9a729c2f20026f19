"""Which worker gets a request: by its session, its adapter, its prefix, or the load."""

from __future__ import annotations

import sys
import time
from collections.abc import Container

from lmi_server.contract.protocol import Input
from lmi_server.serving.dispatch.request_affinity import RequestAffinity
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.worker_process import WorkerProcess
from lmi_server.supervisor.worker_requests import WorkerRequests


class Router:
    """Chooses among the workers of `roster`, and remembers where requests went as far as the settings ask for it.

    `adapters` has the names of adapters that a request may have in `model`.
    """

    def __init__(self, settings: PoolSettings, roster: WorkerRoster, adapters: Container[str] = frozenset()) -> None:
        self._affinity = RequestAffinity[WorkerProcess](
            settings.sessions, settings.prefix_affinity, settings.adapter_affinity, adapters
        )
        self.sessions = self._affinity.sessions
        self._chooses = self._affinity.chooses
        self._max_in_flight = settings.max_in_flight
        self._roster = roster

    def worker_for(self, request: Input) -> WorkerProcess | None:
        """Return a worker with room, None if there is none.

        The worker of the session comes first, the least loaded one last. In between come a worker with the adapter and
        one that knows the beginning of the request, if the settings say so.
        """
        sessions = self.sessions
        if sessions is not None and sessions.has_any:
            sticky = sessions.worker_of(request)
            if sticky is not None and self.has_room(sticky.requests):
                return sticky
        if not self._compares:
            return self._least_loaded()
        able = [worker for worker in self._roster.ready if self.has_room(worker.requests)]
        return self._affinity.choose(request, {worker: len(worker.requests.in_flight) for worker in able})

    def window_for(self, request: Input) -> WorkerRequests | None:
        """Return where a request may wait, chosen as in `worker_for`; None if no worker takes more ahead."""
        able = [worker for worker in self._roster.ready if len(worker.requests.ahead) < worker.requests.window]
        worker = self._affinity.worker_of_session(request)
        if worker is None or worker not in able:
            worker = self._affinity.choose(request, {worker: len(worker.requests.in_flight) for worker in able})
        return None if worker is None else worker.requests

    @property
    def _compares(self) -> bool:
        """Return whether there is anything to compare: a single worker gets every request."""
        return self._chooses and len(self._roster.ready) > 1

    def has_room(self, requests: WorkerRequests) -> bool:
        if requests.batch_size is None:
            return len(requests.in_flight) < self._max_in_flight
        return requests.takes_batch(time.monotonic())

    @property
    def places(self) -> int:
        """Return how many requests the workers take at a time."""
        return sum(worker.requests.batch_size or self._max_in_flight for worker in self._roster.ready)

    @property
    def free_places(self) -> int:
        """Return how many more requests the workers take, if they serve requests concurrently."""
        return sum(max(0, self._max_in_flight - len(worker.requests.in_flight)) for worker in self._roster.ready)

    def record(self, request: Input, worker: WorkerProcess) -> None:
        """Record where a request goes, so that similar ones follow."""
        if self._compares:
            self._affinity.record(request, worker)
        elif self.sessions is not None:
            self.sessions.record(request, worker)

    def forget(self, worker: WorkerProcess) -> None:
        """Let requests that would go to this worker, which takes no more, go to any other."""
        self._affinity.forget(worker)

    def _least_loaded(self) -> WorkerProcess | None:
        best: WorkerProcess | None = None
        least = sys.maxsize
        for worker in self._roster.ready:
            held = len(worker.requests.in_flight)
            if held < least and self.has_room(worker.requests):
                best, least = worker, held
        return best
