"""The LoRA adapters of one model: registered with all its workers, and replayed to each that starts later."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lmi_server.artifacts.fetch import ArtifactSettings, fetch_model_directory
from lmi_server.artifacts.location import BUCKETS, has_scheme
from lmi_server.contract.errors import (
    ArtifactError,
    LmiServerError,
    ModelExistsError,
    ModelLoadError,
    ModelNotFoundError,
    ModelNotReadyError,
    RequestError,
    WorkerDiedError,
)
from lmi_server.contract.protocol import Adapter, AddAdapter, RemoveAdapter
from lmi_server.contract.texts.log_fields import WorkerLogger
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)


class RegisteredAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter as it was registered; `source` is the URL, path or hub id that its files came from."""

    adapter: Adapter
    source: str

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def alias(self) -> str:
        """Return the name that messages use."""
        return self.adapter.alias or self.adapter.name


class Adapters:
    """The adapters of one model. At any time every ready worker has all of them.

    `given` are those at the start; `workers` returns the ready workers. Each command gets `timeout_s` seconds. A worker
    that does not answer in time is killed, because it may or may not have made the change. Its successor gets all
    adapters before it becomes ready.
    """

    def __init__(
        self, given: Sequence[RegisteredAdapter], workers: Callable[[], Sequence[WorkerProcess]], timeout_s: float
    ) -> None:
        self._adapters = {registered.name: registered for registered in given}
        self._since = dict.fromkeys(self._adapters, time.time())
        self._workers = workers
        self._timeout_s = timeout_s
        self._changing = asyncio.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    @property
    def names(self) -> list[str]:
        return sorted(self._adapters)

    def registered_at(self, name: str) -> float:
        """Return when the adapter was registered, by time.time(). Raises KeyError."""
        return self._since[name]

    def get(self, name: str) -> RegisteredAdapter:
        """Return an adapter. Raises ModelNotFoundError."""
        registered = self._adapters.get(name)
        if registered is None:
            raise ModelNotFoundError(f"Adapter not found: {excerpt(name)}")
        return registered

    async def all(self) -> list[RegisteredAdapter]:
        """Return every adapter, once the changes that have begun are made."""
        async with self._changing:
            return list(self._adapters.values())

    def refuse_known(self, name: str) -> None:
        """Raise ModelExistsError if an adapter of that name is registered."""
        if name in self._adapters:
            raise ModelExistsError(f"Adapter {name} is already registered.")

    async def register(self, registered: RegisteredAdapter) -> str:
        """Give a new adapter to every worker; return the handler's message, often "".

        Raises the error with which a worker refuses it; no worker has it then.
        """
        async with self._changing:
            self.refuse_known(registered.name)
            return await self._put(registered)

    async def update(self, registered: RegisteredAdapter) -> str:
        """Replace the adapter of the same name; return the handler's message, often "".

        Raises the error with which a worker refuses it; every worker keeps the old adapter then.
        """
        async with self._changing:
            self.get(registered.name)
            return await self._put(registered)

    async def remove(self, name: str) -> str:
        """Remove an adapter from every worker; return the handler's message, often "".

        Requests that run with it finish. Raises ModelNotFoundError, or the error with which a worker refuses; every
        worker keeps the adapter then.
        """
        async with self._changing:
            self.get(name)
            workers = list(self._workers())
            outcomes = await self._everywhere(workers, RemoveAdapter(name))
            refusals = _refusals(outcomes)
            if refusals:
                await self._restore(name, workers, outcomes)
                raise refusals[0]
            del self._adapters[name], self._since[name]
            return _first_message(outcomes)

    async def equip(self, worker: WorkerProcess) -> None:
        """Give every adapter to a worker that has just loaded the model. Raises ModelLoadError if one fails.

        The worker must become ready in the same turn of the event loop in which this returns. Otherwise a change could
        begin in between, and would not reach the worker.
        """
        async with self._changing:
            for registered in self._adapters.values():
                try:
                    await self._do(worker, AddAdapter(registered.adapter))
                except LmiServerError as error:
                    raise ModelLoadError(f"adapter {registered.name}: {error.message}") from error

    async def _put(self, registered: RegisteredAdapter) -> str:
        workers = list(self._workers())
        if not workers:
            raise ModelNotReadyError("No worker of the model is ready to take adapters")
        outcomes = await self._everywhere(workers, AddAdapter(registered.adapter))
        dead = [outcome for outcome in outcomes if isinstance(outcome, WorkerDiedError)]
        refusals = _refusals(outcomes)
        if refusals or len(dead) == len(workers):
            await self._restore(registered.name, workers, outcomes)
            raise (refusals or dead)[0]
        self._adapters[registered.name] = registered
        self._since.setdefault(registered.name, time.time())
        return _first_message(outcomes)

    async def _restore(
        self, name: str, workers: Sequence[WorkerProcess], outcomes: Sequence[LmiServerError | str]
    ) -> None:
        """Undo a change in the workers that have made it."""
        changed = [worker for worker, outcome in zip(workers, outcomes, strict=True) if isinstance(outcome, str)]
        before = self._adapters.get(name)
        if before is None:
            await self._everywhere(changed, RemoveAdapter(name))
        else:
            await self._everywhere(changed, AddAdapter(before.adapter))

    async def _everywhere(
        self, workers: Sequence[WorkerProcess], command: AddAdapter | RemoveAdapter
    ) -> list[LmiServerError | str]:
        """Send `command` to each worker; return for each the handler's message, or the error with which it refused."""

        async def attempt(worker: WorkerProcess) -> LmiServerError | str:
            try:
                return await self._do(worker, command)
            except LmiServerError as error:
                return error

        return await asyncio.gather(*(attempt(worker) for worker in workers))

    async def _do(self, worker: WorkerProcess, command: AddAdapter | RemoveAdapter) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                return (await worker.controls.call(command)).decode()
        except TimeoutError:
            late = f"did not finish {command.operation} within {self._timeout_s:g} seconds"
            WorkerLogger(logger, worker.name).error("%s; killing it", late)
            worker.kill()
            raise WorkerDiedError(f"The worker {late}") from None


def _refusals(outcomes: Sequence[LmiServerError | str]) -> Sequence[LmiServerError]:
    """Return the errors of workers that live. Dead ones do not count: their successors get the right adapters."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, LmiServerError)]
    return [error for error in errors if not isinstance(error, WorkerDiedError)]


def _first_message(outcomes: Sequence[LmiServerError | str]) -> str:
    return next((outcome for outcome in outcomes if isinstance(outcome, str) and outcome), "")


def adapter_base(source: str, model_dir: str) -> Path:
    """Return the directory that the source of an adapter is relative to: `model_dir` if it is there.

    A source with a scheme is relative to nothing.
    """
    beside = not has_scheme(source) and os.path.exists(Path(model_dir, source))
    return Path(model_dir) if beside else Path.cwd()


async def fetch_adapter(source: str, model_dir: str, settings: ArtifactSettings, own_code: bool = False) -> str:
    """Fetch an adapter and return its directory.

    `source` is a directory or archive (relative paths are relative to `model_dir`), s3://bucket/prefix, or a hub id.
    With `own_code` the model's own code keeps its adapters, and gets any other source as it is, as with LMI. Raises
    RequestError if there is none, or it cannot be fetched.
    """
    base = await asyncio.to_thread(adapter_base, source, model_dir)
    beside = base == Path(model_dir)
    if own_code and not beside and not source.startswith(BUCKETS):
        return source
    try:
        return str(await fetch_model_directory(str(Path(model_dir, source)) if beside else source, settings))
    except ArtifactError as error:
        raise RequestError(f"src = {excerpt(SECRETS.mask(source), 200)}: {error.message}") from error


def adapters_in(directories: Sequence[Path]) -> tuple[RegisteredAdapter, ...]:
    """Return an adapter for each directory inside `directories`, named after it; of several of a name, the first."""
    found: dict[str, RegisteredAdapter] = {}
    for parent in directories:
        for directory in sorted(parent.iterdir()) if parent.is_dir() else ():
            if directory.is_dir() and not directory.name.startswith("."):
                adapter = Adapter(name=directory.name, directory=str(directory))
                registered = RegisteredAdapter(adapter=adapter, source=str(directory))
                found.setdefault(directory.name, registered)
    return tuple(found.values())
