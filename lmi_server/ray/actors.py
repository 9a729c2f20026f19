"""The actors of the application, one class per kind of deployment. Ray starts, checks and ends them.

Requests do not pass through here: an actor starts a process beside it, and tells it what Ray says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from lmi_server.machine.ports import free_port
from lmi_server.ray.announcements import ANNOUNCEMENT, watch
from lmi_server.ray.autoscaling import ONGOING
from lmi_server.ray.child import Child
from lmi_server.ray.directory import Directory
from lmi_server.ray.messages import (
    Drain,
    FromFrontEnd,
    FromReplica,
    Listening,
    NotServing,
    Ongoing,
    Serving,
    Start,
    Wanted,
)
from lmi_server.ray.ranks import FurtherRanks
from lmi_server.supervisor.replicas import Backoff

logger = logging.getLogger(__name__)

_REPLICA_PROCESS = "lmi_server.ray.replica_process"
_INGRESS_PROCESS = "frontend.ray.ingress"
_END_S = 5.0  # beyond the limit of the drain
_SILENCE_S = 60.0  # a process that serves reports every second


class Replica:
    """One replica of a model. It is there once the model is loaded."""

    _child: Child | None = None  # until its ranks have their places

    # Ray awaits it, in the thread whose loop the actor has.
    async def __init__(self, start: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._start = msgspec.convert({**start, "host": ray.util.get_node_ip_address()}, Start)
        self._loop = asyncio.get_running_loop()
        self._serving: asyncio.Future[Serving] = self._loop.create_future()
        self._ongoing = 0
        self._heard_at = 0.0
        self._ending = False
        self._failure = ""
        self._ranks = FurtherRanks()
        variables = await self._ranks.variables()
        self._child = Child([_REPLICA_PROCESS], variables, self._on_line, self._on_end)
        self._child.tell(self._start)
        serving = await self._serving
        self._announcement = {ANNOUNCEMENT: msgspec.json.encode(serving).decode()}

    async def __call__(self) -> str:
        """Return what the replica announces, as JSON. A call has Ray start a replica if there is none."""
        return self._announcement[ANNOUNCEMENT]

    async def process_id(self) -> int:
        """Return the id of the process that serves."""
        assert self._child is not None, "Ray calls an actor once it is initialised"
        return self._child.pid

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return where front ends connect to; Ray asks once, and tells the router of each handle."""
        return self._announcement

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many requests the replica holds, of which Ray sees nothing."""
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
            case Serving():
                self._serving.set_result(message)
            case NotServing(reason):
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


class Ingress:
    """One front end, which takes the requests for every model of the application. It is there once it has its port.

    `replicas` are handles: they make Ray deploy the models with the ingress. `reconfigure` says which models there are.
    """

    async def __init__(  # type: ignore[misc]
        self, host: str, port: int, drain_timeout_s: float, *replicas: object
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._drain_timeout_s = drain_timeout_s
        self._app = serve.get_replica_context().app_name
        port = port or free_port(None)
        node = ray.get_runtime_context().get_node_id()
        self._address = {"host": ray.util.get_node_ip_address(), "port": port, "node": node}
        self._directory = Directory()
        self._handles: dict[str, Any] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}  # calls that have a replica started, by deployment
        self._ending = False
        self._listening: asyncio.Future[None] = self._loop.create_future()
        arguments = [_INGRESS_PROCESS, host, str(port), str(drain_timeout_s)]
        self._child = Child(arguments, {}, self._on_line, self._on_end)
        await self._listening

    async def __call__(self) -> dict[str, Any]:
        """Return address, node and process of the front end, and the number of replicas of each model."""
        replicas = {model.name: len(model.places) for model in self._directory.models().models}
        return {**self._address, "process": self._child.pid, "models": replicas}

    def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Serve the models of `config`, a list of Replicas without places, with the name of each deployment."""
        self._directory.configure(config["models"])
        models = {entry["deployment"] for entry in config["models"]}
        for deployment in self._handles.keys() - models:
            del self._handles[deployment]
            if (call := self._waking.pop(deployment, None)) is not None:
                call.cancel()  # it would wait for ever, and the deployment may come back
        for deployment in models - self._handles.keys():
            watch(self._app, deployment, self._on_replicas)
            # Whether it exists is not asked: it may be gone already, if the application ends while it is deployed.
            handle = serve.get_deployment_handle(deployment, self._app, _check_exists=False)
            self._handles[deployment] = handle
            handle._init()  # makes the router, which hears from Ray which replicas there are
        self._tell()

    def check_health(self) -> None:
        """Do nothing: the end of the process ends the actor."""

    def __del__(self) -> None:
        self._ending = True
        self._child.end(self._drain_timeout_s + _END_S)

    def _on_replicas(self, deployment: str, announced: Mapping[str, str]) -> None:
        self._loop.call_soon_threadsafe(self._update, deployment, announced)

    def _update(self, deployment: str, announced: Mapping[str, str]) -> None:
        if self._directory.announce(deployment, announced):
            self._tell()

    def _on_line(self, text: bytes) -> None:
        self._loop.call_soon_threadsafe(self._on_message, msgspec.json.decode(text, type=FromFrontEnd))

    def _on_message(self, message: FromFrontEnd) -> None:
        match message:
            case Listening():
                self._listening.set_result(None)
            case Wanted(name):
                self._wake(name)

    def _wake(self, name: str) -> None:
        """Have Ray start a replica of a model that has none: it does so for a call by a handle, which waits for it."""
        deployment = self._directory.deployment_of(name)
        if deployment is not None and deployment not in self._waking:
            self._waking[deployment] = task = self._loop.create_task(self._call(deployment))
            task.add_done_callback(partial(self._woken, deployment))

    def _woken(self, deployment: str, call: asyncio.Task[None]) -> None:
        if self._waking.get(deployment) is call:
            del self._waking[deployment]

    async def _call(self, deployment: str) -> None:
        backoff = Backoff()
        while deployment in self._handles:
            try:
                announced = await self._handles[deployment].remote()
            except (RayError, RayServeException) as error:
                logger.warning("cannot start a replica of %s: %s", deployment, error)
                await asyncio.sleep(backoff.pause_s(False))
            else:
                if self._directory.describe(deployment, announced):
                    self._tell()
                return

    def _tell(self) -> None:
        self._child.tell(self._directory.models())

    def _on_end(self, code: int) -> None:
        self._loop.call_soon_threadsafe(self._ended, code)

    def _ended(self, code: int) -> None:
        if self._ending:
            return
        if self._listening.done():
            os._exit(1)
        self._ending = True
        self._listening.set_exception(
            RuntimeError(
                f"the front end cannot listen on port {self._address['port']} of {self._address['host']}, or ended for"
                f" another reason, which its log has (exit code {code}); choose another port by --port"
            )
        )
