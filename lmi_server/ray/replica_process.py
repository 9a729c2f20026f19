"""The process that serves one replica: `python -m lmi_server.ray.replica_process`. The actor of the replica starts it.

It loads the model and keeps its worker as a server does, and takes the connections of front ends. It has a process of
its own because Ray's actor shares its interpreter with the threads of Ray, which would be in the way of every token.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import sys
from collections.abc import Mapping

import msgspec
import uvloop

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.link import Arrival, FrontendLink
from lmi_server.machine.environment import process_environment
from lmi_server.ray.messages import (
    FromReplica,
    ModelDescription,
    Ongoing,
    ReplicaFailed,
    ReplicaReady,
    Start,
    line,
)
from lmi_server.ray.processes.front_end import FrontEndConnection
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.launch.remote import TOKEN_BYTES, RemotePlace
from lmi_server.supervisor.orphans import Orphans

logger = logging.getLogger(__name__)

_REPORT_S = 1.0
_LOG_LEVEL = "INFO"
_BATCHES_AHEAD = 2  # how many batches a front end may send in advance, so that full ones can be formed here
ONE_WORKER: Mapping[str, str] = {"minWorkers": "1", "maxWorkers": "1"}


def main() -> int:
    # What code of a model prints must not reach the actor as a message.
    output = os.dup(1)
    os.dup2(2, 1)
    # A buffer would keep a Drain that follows at once from `_next_line`.
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        start = msgspec.json.decode(unbuffered.readline(), type=Start)
    logging.basicConfig(stream=sys.stderr, level=_LOG_LEVEL, format="%(levelname)s %(name)s: %(message)s")
    return uvloop.run(_ReplicaProcess(start, output).serve())


class _ReplicaProcess:
    """The replica, from the load of its model to its end."""

    def __init__(self, start: Start, output: int) -> None:
        self._start = start
        self._output = output
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._front_ends: set[FrontEndConnection] = set()

    async def serve(self) -> int:
        environment = process_environment()
        models = ModelRegistry(
            environment,
            artifact_settings(None, environment),
            inspect_model,
            self._start.drain_timeout_s,
            _LOG_LEVEL,
        )
        orphans = Orphans()
        orphans.start()
        try:
            return await self._serve(models)
        except LmiServerError as error:
            self._tell(ReplicaFailed(error.message))
            return 1
        finally:
            await models.stop()
            orphans.end()

    async def _serve(self, models: ModelRegistry) -> int:
        start = self._start
        source = ModelSource(start.url, start.name, settings={**start.settings, **ONE_WORKER})
        ending = asyncio.create_task(_next_line())
        loading = asyncio.create_task(models.register_and_load(source))
        await asyncio.wait([ending, loading], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return 0
        model = loading.result()
        server = await asyncio.get_running_loop().create_server(
            lambda: Arrival(TOKEN_BYTES, lambda token, _: self._accept(token, model.loaded())), start.host, 0
        )
        port = server.sockets[0].getsockname()[1]
        self._tell(ReplicaReady(name=start.name, place=self._place(model, port), model=_describe(model)))
        failed = await self._watch(model, ending)
        server.close()
        if failed is None and ending.result():
            await self._drain(model.loaded())
        else:
            models.kill()
        return 0 if failed is None else 1

    def _place(self, model: Model, port: int) -> RemotePlace:
        batch_size = model.loaded().members.batch_size
        ahead = 0 if batch_size is None else _BATCHES_AHEAD * batch_size
        return RemotePlace(host=self._start.host, port=port, token=self._token, ahead=ahead)

    def _accept(self, token: bytes, pool: WorkerPool) -> FrontendLink | None:
        """Return the link of a front end that has connected; None if what it sent is not the token."""
        if not hmac.compare_digest(token, self._token.encode()):
            logger.warning("refused a connection that does not know the token of this replica")
            return None
        front_end = FrontEndConnection(pool, self._front_ends.discard)
        self._front_ends.add(front_end)
        front_end.greet()
        return front_end.link

    async def _watch(self, model: Model, ending: asyncio.Task[bytes]) -> str | None:
        """Report once a second, until the actor asks for the end or is gone; return why the model failed before."""
        pool = model.loaded()
        while not ending.done():
            if model.failure is not None:
                self._tell(ReplicaFailed(model.failure.message))
                return model.failure.message
            for front_end in self._front_ends:
                front_end.report()
            self._tell(Ongoing(pool.dispatcher.queued + pool.dispatcher.in_flight))
            await asyncio.wait([ending], timeout=_REPORT_S)
        return None

    async def _drain(self, pool: WorkerPool) -> None:
        """Finish what the front ends have sent, within the limit; they give what comes now to other replicas."""
        for front_end in list(self._front_ends):
            front_end.leave()
        logger.info("draining: %d requests", pool.dispatcher.queued + pool.dispatcher.in_flight)
        deadline = asyncio.get_running_loop().time() + self._start.drain_timeout_s
        while self._front_ends and asyncio.get_running_loop().time() < deadline:
            for front_end in self._front_ends:
                front_end.report()
            await asyncio.sleep(_REPORT_S / 20)

    def _tell(self, message: FromReplica) -> None:
        os.write(self._output, line(message))


def _describe(model: Model) -> ModelDescription:
    resolved = model.resolved
    assert resolved is not None, "a loaded model has a configuration"
    adapters = model.loaded().adapters
    return ModelDescription(
        url=model.source.url,
        model_dir=resolved.model_dir,
        handler=resolved.spec.title,
        options=resolved.options.dump(),
        passed_through=dict(resolved.options.passed_through),
        serving=resolved.serving.model_dump(mode="json", exclude_unset=True),
        adapters={name: adapters.get(name).adapter.directory for name in adapters.names},
    )


async def _next_line() -> bytes:
    """Return the next line of the actor; empty if the actor is dead."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return await reader.readline()


if __name__ == "__main__":
    sys.exit(main())
