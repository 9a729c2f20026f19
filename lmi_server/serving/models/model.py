"""A model of the server: one version of it, and the versions that share a name."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lmi_server.configuration.model_directory.model_code import MODEL_CODE
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.errors import LmiServerError, ModelNotFoundError, ModelNotReadyError
from lmi_server.contract.progress import Progress
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.files.file_state import FileState
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.reload import Reload, ReloadStatus
from lmi_server.serving.pool.load_reports import LoadStatus
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.supervisor.job import Job


class Trial(Protocol):
    """Another pool that gets a part of a model's requests until it is known whether it takes the place of the first."""

    @property
    def pool(self) -> WorkerPool | None:
        """That pool; None once it gets none any more."""

    def choose(self, pool: WorkerPool, request: Input) -> WorkerPool:
        """Return the pool that gets a request, which would go to `pool`; the same for the same request."""

    def note(self, pool: WorkerPool, job: Job, status: int) -> None:
        """Take note of a request that has ended, with the status under which it counts."""


class Model:
    """One version of a model, from its registration to its end.

    `label` is its name, with its version if it has one. `reload` is the last attempt to load it again, and `reloads`
    counts how they ended. `directory` is the local one with its configuration, None before it is there; `configured_by`
    is the state of that file when it was read. `fetching` is the last that a fetch of its files reported. `notes`
    return what features add to its description. While there is a `trial`, it chooses where requests go.
    """

    def __init__(self, source: ModelSource, at_startup: bool) -> None:
        self.source = source
        self.label = source.label
        self.at_startup = at_startup
        self.registered_at = time.time()
        self.directory: Path | None = None
        self.configured_by: FileState = None
        self.fetching: Progress | None = None
        self.notes: dict[str, Callable[[], Any]] = {}
        self.trial: Trial | None = None
        self.reload: Reload | None = None
        self.reloads: Counter[ReloadStatus] = Counter()
        self.resolved: ResolvedModel | None = None
        self.pool: WorkerPool | None = None
        self.batches_statically = False  # because the rolling batch has refused it
        self.failed: LmiServerError | None = None  # why there will be no pool
        self.settled = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def version(self) -> str | None:
        return self.source.version

    @property
    def status(self) -> ModelStatus:
        if self.failed is not None:
            return ModelStatus.FAILED
        return ModelStatus.PENDING if self.pool is None else self.pool.availability.status

    @property
    def failure(self) -> LmiServerError | None:
        """Return why the model is FAILED."""
        return self.failed or (None if self.pool is None else self.pool.availability.failure)

    @property
    def loading(self) -> LoadStatus | None:
        """Return how far the model is on its way to its first worker, to its next version, or to one worker more.

        None if it is not on such a way.
        """
        if self.status is ModelStatus.PENDING:
            return LoadStatus(self._first_load(), self.registered_at)
        again = self.reload.loading() if self.reload is not None and self.is_reloading else None
        return again or (None if self.pool is None else self.pool.loads.current)

    def _first_load(self) -> Progress:
        if self.pool is None:
            return self.fetching or Progress("reading its configuration")
        worker = self.pool.roster.loading
        return (None if worker is None else worker.loading) or Progress("starting its workers")

    @property
    def is_idle(self) -> bool:
        """Return whether the model can serve and has no request."""
        if self.pool is None or self.status is not ModelStatus.HEALTHY:
            return False
        return not (self.pool.dispatcher.queued or self.pool.dispatcher.in_flight)

    @property
    def runs_user_code(self) -> bool:
        """Return whether the user's own code gets the bytes of a request as they were sent."""
        return self.resolved is not None and self.resolved.spec.runs_user_code

    @property
    def has_code(self) -> bool:
        """Return whether a model.py of the model or of an adapter, or a function that an option names, reads requests.

        It looks at files, so it is for the requests that would be refused otherwise.
        """
        if self.pool is None or self.resolved is None:
            return False
        adapters = (self.pool.adapters.get(name).adapter.directory for name in self.adapter_names)
        directories = (self.resolved.model_dir, *adapters)
        return self.resolved.options.input_formatter is not None or any(
            Path(directory, MODEL_CODE).is_file() for directory in directories
        )

    @property
    def adapter_names(self) -> list[str]:
        """Return the adapters that calls or the directory of the model have brought, and no request."""
        if self.pool is None:
            return []
        on_demand = self.pool.on_demand
        return [name for name in self.pool.adapters.names if on_demand is None or not on_demand.keeps(name)]

    async def stored_adapters(self) -> list[str]:
        """Return the names of the adapters in its store, as a request names them: MODEL:ADAPTER."""
        if self.pool is None or self.pool.store_listing is None or self.resolved is None:
            return []
        base = next(iter(self.resolved.options.served_model_name), self.name)
        known = set(self.adapter_names)
        return [f"{base}:{name}" for name in await self.pool.store_listing.names() if name not in known]

    @property
    def is_reloading(self) -> bool:
        return self.reload is not None and self.reload.status is ReloadStatus.LOADING

    async def until_reloaded(self) -> None:
        """Wait until the model is not being loaded again: what changes its pool now would be lost then."""
        while self.reload is not None and self.is_reloading:
            await self.reload.wait()

    def loaded(self) -> WorkerPool:
        """Return the pool. Raises ModelNotReadyError if there is none yet, or never will be."""
        if self.pool is None:
            reason = "it is loading" if self.failed is None else self.failed.message
            raise ModelNotReadyError(f"Model is not ready: {self.name}: {reason}")
        return self.pool

    @property
    def pools(self) -> list[WorkerPool]:
        """Return the pool, and that of a trial. Raises ModelNotReadyError as `loaded` does."""
        other = None if self.trial is None else self.trial.pool
        return [self.loaded(), *(() if other is None else (other,))]

    def serving(self, request: Input) -> WorkerPool:
        """Return the pool that gets a request. Raises ModelNotReadyError as `loaded` does."""
        pool = self.loaded()
        return pool if self.trial is None else self.trial.choose(pool, request)


class Endpoint:
    """The versions of one model. Requests that name no version go to them in turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.models: list[Model] = []
        self._turn = 0

    @property
    def status(self) -> ModelStatus:
        """Return the status of the version that is worst off."""
        return max((model.status for model in self.models), key=list(ModelStatus).index)

    def choose(self, version: str | None) -> Model:
        """Return the model of that version, or the next one that can serve. Raises ModelNotFoundError."""
        if version is not None:
            return self.version(version)
        if len(self.models) == 1:
            return self.models[0]
        # Versions that are loading or broken get no requests, unless there are no others: these then say why.
        able = [model for model in self.models if model.status is ModelStatus.HEALTHY] or self.models
        self._turn += 1
        return able[self._turn % len(able)]

    def choose_preferring(self, version: str | None) -> Model:
        """Return the model of that version if there is one, otherwise the one of `choose` without a version."""
        return self.choose(version if any(model.version == version for model in self.models) else None)

    def version(self, version: str | None) -> Model:
        for model in self.models:
            if model.version == version:
                return model
        raise ModelNotFoundError(f"Model or workflow not found: {self.name}/{excerpt(version or '')}")
