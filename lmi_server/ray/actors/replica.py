"""The actor of one replica: Ray starts, checks and ends it. The process beside it (`replica_process`) serves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import ray

from lmi_server.ray.actors.announcements import ANNOUNCEMENT
from lmi_server.ray.actors.child import Child
from lmi_server.ray.actors.ranks import RankReservations
from lmi_server.ray.autoscaling import ONGOING
from lmi_server.ray.messages import Drain, FromReplica, Ongoing, ReplicaFailed, ReplicaReady, Start

_REPLICA_PROCESS = "lmi_server.ray.replica_process"
_END_S = 5.0  # beyond the limit of the drain
_SILENCE_S = 60.0  # a process that serves reports every second


class Replica:
    """One replica of a model. It is there once the model is loaded."""

    _child: Child | None = None  # until its ranks have their places

    # Ray awaits it, in the thread whose loop the actor has.
    async def __init__(self, start: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._start = msgspec.convert({**start, "host": ray.util.get_node_ip_address()}, Start)
        self._loop = asyncio.get_running_loop()
        self._serving: asyncio.Future[ReplicaReady] = self._loop.create_future()
        self._ongoing = 0
        self._heard_at = 0.0
        self._ending = False
        self._failure = ""
        self._ranks = RankReservations()
        variables = await self._ranks.variables()
        self._child = Child([_REPLICA_PROCESS], variables, self._on_line, self._on_end)
        self._child.tell(self._start)
        serving = await self._serving
        self._announcement = {ANNOUNCEMENT: msgspec.json.encode(serving).decode()}

    async def __call__(self) -> str:
        """Return what the replica announces, as JSON. Ray starts a replica for a call if none runs."""
        return self._announcement[ANNOUNCEMENT]

    async def process_id(self) -> int:
        """Return the id of the process that serves."""
        assert self._child is not None, "Ray calls an actor once it is initialised"
        return self._child.pid

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return where front ends connect to; Ray asks once, and tells the router of each handle."""
        return self._announcement

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many requests the replica holds. Ray does not see them."""
        return {ONGOING: float(self._ongoing)}

    def check_health(self) -> None:
        """Raise RuntimeError if the model is given up, or the process hangs; its end ends the actor."""
        if self._failure:
            raise RuntimeError(self._failure)
        silent_s = time.monotonic() - self._heard_at
        if silent_s > _SILENCE_S:
            raise RuntimeError(f"the process of the replica has not reported for {silent_s:.0f} seconds")

    def __del__(self) -> None:
        self._ending = True
        if self._child is not None:
            self._child.tell(Drain())
            self._child.wait(self._start.drain_timeout_s + _END_S)

    def _on_line(self, text: bytes) -> None:
        self._heard_at = time.monotonic()
        self._loop.call_soon_threadsafe(self._on_message, msgspec.json.decode(text, type=FromReplica))

    def _on_message(self, message: FromReplica) -> None:
        match message:
            case ReplicaReady():
                self._serving.set_result(message)
            case ReplicaFailed(reason):
                self._fail(reason)
            case Ongoing(requests):
                self._ongoing = requests

    def _on_end(self, code: int) -> None:
        if self._ending:
            return
        if self._serving.done() and self._serving.exception() is not None:
            return  # Ray reads why the model could not be loaded, and ends the actor
        if self._serving.done():
            os._exit(1)  # Ray sees the end of an actor at once, and its health only now and then
        self._loop.call_soon_threadsafe(self._fail, f"the process of the replica exited with code {code}")

    def _fail(self, reason: str) -> None:
        self._failure = reason
        if not self._serving.done():
            self._serving.set_exception(RuntimeError(reason))
