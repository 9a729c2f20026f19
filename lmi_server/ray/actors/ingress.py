"""The actor of a front end: Ray starts, checks and ends it. The process beside it (`frontend.ray.ingress`) listens.

No request passes through an actor: it tells its process what Ray says.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from lmi_server.machine.ports import free_port
from lmi_server.ray.actors.announcements import watch
from lmi_server.ray.actors.child import Child
from lmi_server.ray.actors.directory import Directory
from lmi_server.ray.messages import FromFrontEnd, Listening, ReplicaNeeded
from lmi_server.supervisor.replicas import Backoff

logger = logging.getLogger(__name__)

_INGRESS_PROCESS = "frontend.ray.ingress"
_END_S = 5.0  # beyond the limit of the drain


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
        """Serve the models of `config`, a list of ModelReplicas without places, with the name of each deployment."""
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
            case ReplicaNeeded(name):
                self._wake(name)

    def _wake(self, name: str) -> None:
        """Have Ray start a replica of a model that has none: it does so for a call by a handle, which waits for it."""
        deployment = self._directory.deployment_of(name)
        if deployment is not None and deployment not in self._waking:
            self._waking[deployment] = task = self._loop.create_task(self._call(deployment))
            task.add_done_callback(partial(self._forget_call, deployment))

    def _forget_call(self, deployment: str, call: asyncio.Task[None]) -> None:
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
        self._loop.call_soon_threadsafe(self._end_with, code)

    def _end_with(self, code: int) -> None:
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
