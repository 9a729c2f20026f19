"""Which worker gets a request: by its session, its adapter, its prefix, or the load."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from lmi_server.contract.protocol import ADAPTER_HEADER, Input
from lmi_server.serving.dispatch.affinity.adapter_affinity import AdapterAffinity
from lmi_server.serving.dispatch.affinity.prefix_affinity import PrefixAffinity
from lmi_server.serving.dispatch.affinity.sticky_sessions import StickySessions
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.worker_process import WorkerProcess
from lmi_server.supervisor.worker_requests import WorkerRequests


class Router:
    """Chooses among the workers of `roster`, and remembers where requests went as far as the settings ask for it."""

    def __init__(self, settings: PoolSettings, roster: WorkerRoster) -> None:
        self.sessions = StickySessions() if settings.sessions else None
        self.prefixes: PrefixAffinity[WorkerProcess] | None = PrefixAffinity() if settings.prefix_affinity else None
        limit = settings.adapter_affinity
        self._adapters: AdapterAffinity[WorkerProcess] | None = AdapterAffinity(limit) if limit else None
        self._max_in_flight = settings.max_in_flight
        self._roster = roster

    def worker_for(self, request: Input) -> WorkerProcess | None:
        """Return a worker with room, None if there is none.

        The worker of the session comes first, the least loaded one last. In between come a worker with the adapter and
        one that knows the beginning of the request, if the settings say so.
        """
        sticky = self._worker_of_session(request)
        if sticky is not None and self.has_room(sticky.requests):
            return sticky
        if self.prefixes is None:
            return self._least_loaded()
        able = [worker for worker in self._roster.ready if self.has_room(worker.requests)]
        held: Mapping[WorkerProcess, int] = {worker: len(worker.requests.in_flight) for worker in able}
        if self._adapters is not None and (adapter := request.properties.get(ADAPTER_HEADER)):
            held = self._adapters.narrow(adapter, held)
        return self.prefixes.choose(request.body(), held)

    def window_for(self, request: Input) -> WorkerRequests | None:
        """Return where a request may wait: with the worker of its session, otherwise with the least loaded one."""
        able = [worker for worker in self._roster.ready if len(worker.requests.ahead) < worker.requests.window]
        sticky = self._worker_of_session(request)
        if sticky is not None and sticky in able:
            return sticky.requests
        return min((worker.requests for worker in able), key=lambda held: len(held.in_flight), default=None)

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
        if self.sessions is not None:
            self.sessions.record(request, worker)
        if self.prefixes is not None:
            self.prefixes.record(request.body(), worker)
        if self._adapters is not None and (adapter := request.properties.get(ADAPTER_HEADER)):
            self._adapters.record(adapter, worker)

    def forget(self, worker: WorkerProcess) -> None:
        """Let requests that would go to this worker, which takes no more, go to any other."""
        for memory in (self.sessions, self.prefixes, self._adapters):
            if memory is not None:
                memory.forget(worker)

    def _worker_of_session(self, request: Input) -> WorkerProcess | None:
        return None if self.sessions is None else self.sessions.worker_of(request)

    def _least_loaded(self) -> WorkerProcess | None:
        best: WorkerProcess | None = None
        least = sys.maxsize
        for worker in self._roster.ready:
            held = len(worker.requests.in_flight)
            if held < least and self.has_room(worker.requests):
                best, least = worker, held
        return best
