"""LoRA adapters that are loaded when a request asks for them, and their source."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from lmi_server.artifacts.fetch import ArtifactSettings, fetch_model_directory
from lmi_server.artifacts.location import BUCKETS
from lmi_server.contract.errors import (
    ArtifactError,
    ArtifactMissingError,
    ModelNotFoundError,
    ModelNotReadyError,
    QueueFullError,
    RequestError,
)
from lmi_server.contract.protocol import ADAPTER_HEADER, Adapter, Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.serving.adapters.adapters import Adapters, RegisteredAdapter
from lmi_server.supervisor.job import Deadline, until_deadline

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,254}", re.ASCII)  # never a path that leads elsewhere


class OnDemand:
    """Keeps the adapter of a request, named by a header, while the request is served.

    This one leaves that to others: before a cluster, the replicas load adapters.
    """

    async def hold(self, request: Input) -> None:
        """Load the adapter if it is not there, and keep it until `release`. Raises LmiServerError."""

    def release(self, request: Input) -> None:
        """Let the adapter make room for others; each `hold` that has returned is followed by one `release`."""

    def keeps(self, name: str) -> bool:
        """Return whether a request has brought the adapter `name`, and no call."""
        return False

    def stop(self) -> None:
        """Give up what is being loaded."""


async def hold_in_time(on_demand: OnDemand, request: Input, deadline: Deadline | None) -> None:
    """Hold the adapter of a request as `OnDemand.hold` does. Raises DeadlineError too; nothing is held then."""
    remedy = "set option.max_num_adapters_per_replica to a larger number"
    await until_deadline(on_demand.hold(request), deadline, "waited for its adapter", remedy)


@dataclass(slots=True)
class _Entry:
    """One adapter: the task that loads it, and the number of requests with it."""

    task: asyncio.Task[None]
    users: int

    @property
    def is_loaded(self) -> bool:
        return self.task.done()  # an entry whose task has failed is removed


class AdapterStore(OnDemand):
    """Keeps up to `max_loaded` adapters loaded; the least recently used one makes room for the next.

    An adapter that requests hold stays. While all are held, up to `max_waiting` requests for others wait. `fetch`
    returns the directory of an adapter, `until_ready` returns once a worker can take it.
    """

    def __init__(
        self,
        adapters: Adapters,
        fetch: Callable[[str], Awaitable[str]],
        until_ready: Callable[[], Awaitable[None]],
        max_loaded: int,
        max_waiting: int,
    ) -> None:
        self._adapters = adapters
        self._fetch = fetch
        self._until_ready = until_ready
        self._max = max_loaded
        self._max_waiting = max_waiting
        self._waiting = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the most recently used is at the end
        self._leaving: str | None = None
        self._turn = asyncio.Lock()
        self._let_go = asyncio.Event()

    async def hold(self, request: Input) -> None:
        name = request.properties.get(ADAPTER_HEADER)
        if not name or (name in self._adapters and not self.keeps(name)):
            return  # a call, or the directory of the model, has brought it, and it stays
        entry = self._entries.get(name)
        if entry is None or (entry.is_loaded and name not in self._adapters):  # a call has removed it
            entry = self._begin(name, 0 if entry is None else entry.users)
        self._entries.move_to_end(name)
        entry.users += 1
        if not entry.is_loaded:
            await self._wait(entry)

    def release(self, request: Input) -> None:
        entry = self._entries.get(request.properties.get(ADAPTER_HEADER, ""))
        if entry is not None:
            self._leave(entry)

    def keeps(self, name: str) -> bool:
        return name in self._entries or name == self._leaving

    def stop(self) -> None:
        for entry in self._entries.values():
            entry.task.cancel()

    def _begin(self, name: str, users: int) -> _Entry:
        if self._waiting >= self._max_waiting:
            raise QueueFullError(f"job_queue_size={self._max_waiting} requests wait for adapters; send it again later")
        entry = self._entries[name] = _Entry(asyncio.create_task(self._load(name)), users)
        entry.task.add_done_callback(_read_error)
        return entry

    async def _wait(self, entry: _Entry) -> None:
        self._waiting += 1
        try:
            await asyncio.shield(entry.task)  # if this client leaves, others may wait for the adapter
        except BaseException:
            self._leave(entry)
            if entry.task.cancelled():  # by `stop`: it is not this client that has left
                raise ModelNotReadyError("The workers ended while they loaded the adapter") from None
            raise
        finally:
            self._waiting -= 1

    def _leave(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.users:
            self._let_go.set()

    async def _load(self, name: str) -> None:
        try:
            directory = await self._fetch(name)
            async with self._turn:
                await self._make_room()
                await self._until_ready()
                adapter = Adapter(name=name, directory=directory)
                await self._adapters.register(RegisteredAdapter(adapter=adapter, source=directory))
        except BaseException:
            del self._entries[name]
            raise
        logger.info("loaded adapter %s", name)

    async def _make_room(self) -> None:
        while len(loaded := [name for name, entry in self._entries.items() if entry.is_loaded]) >= self._max:
            idle = next((name for name in loaded if not self._entries[name].users), None)
            if idle is None:
                self._let_go.clear()
                await self._let_go.wait()
            else:
                await self._remove(idle)

    async def _remove(self, name: str) -> None:
        del self._entries[name]
        self._leaving = name
        try:
            if name in self._adapters:
                await self._adapters.remove(name)
        finally:
            self._leaving = None
        logger.info("removed adapter %s, the least recently used one", name)


def _read_error(task: asyncio.Task[None]) -> None:
    """Read the error, if any: asyncio reports one that is never read, as when all its clients are gone."""
    if not task.cancelled():
        task.exception()


def is_adapter_name(name: str) -> bool:
    """Return whether a folder of a store with this name can be an adapter."""
    return _NAME.fullmatch(name) is not None


async def fetch_from_store(store: str, name: str, model_dir: str, settings: ArtifactSettings) -> str:
    """Return the directory of the adapter `name` in `store`, a directory or s3://bucket/prefix.

    Raises ModelNotFoundError if the store does not have it, RequestError if it cannot be fetched.
    """
    missing = ModelNotFoundError(f"The adapter {excerpt(name)} is neither registered nor in the store of adapters")
    if not is_adapter_name(name):
        raise missing
    if not store.startswith(BUCKETS):
        directory = Path(model_dir, store, name)
        if not await asyncio.to_thread(directory.is_dir):
            raise missing
        return str(directory)
    try:
        return str(await fetch_model_directory(f"{store.rstrip('/')}/{name}", settings))
    except ArtifactMissingError:
        raise missing from None
    except ArtifactError as error:
        raise RequestError(f"The adapter {name} cannot be fetched: {error.message}") from error
