"""The models of a front end whose replicas run in a cluster. An ingress is told which there are, and where."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_class
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.protocol import Adapter, Load
from lmi_server.ray.messages import (
    ClusterModels,
    FromFrontEnd,
    Listening,
    ModelDescription,
    ModelReplicas,
    ReplicaNeeded,
    line,
)
from lmi_server.ray.processes.remote_replicas import ClusterPool, starting
from lmi_server.serving.adapters.adapter_store import OnDemand
from lmi_server.serving.adapters.adapters import RegisteredAdapter
from lmi_server.serving.models.followed import FollowedModels
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus, PoolSettings

logger = logging.getLogger(__name__)

_LONGEST_LINE = 64 << 20  # a thousand replicas take 150 KiB


class ClusterRegistry(FollowedModels):
    """Registers the models of the ingress, and connects to their replicas as these come and go."""

    untold = "The front end starts, and does not know the models of the cluster yet"
    elsewhere = "The models of a cluster are deployed with lmi-server ray deploy"

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._replicas: Mapping[str, ModelReplicas] = {}
        self._described: Mapping[str, asyncio.Event] = {}
        self._served: dict[str, ModelDescription] = {}  # what the newest pool of each model was made for

    async def follow(self) -> None:
        """Do what the ingress says in the lines of standard input. When it is gone, drain this process.

        The server calls it once it has its port.
        """
        _tell(Listening())
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while told := await reader.readline():
            self.update(msgspec.json.decode(told, type=ClusterModels))
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def startup_statuses(self) -> set[ModelStatus]:
        return super().startup_statuses if self._told.is_set() else {ModelStatus.PENDING}

    def update(self, models: ClusterModels) -> None:
        """Register and unregister models so that there are these, and connect to their replicas.

        Nothing is waited for: while a model that is gone drains, the others need their new replicas.
        """
        self._replicas = {replicas.name: replicas for replicas in models.models}
        for name in self._endpoints.keys() - self._replicas.keys():
            self._leave(name)
        self._described = {name: self._described.get(name) or asyncio.Event() for name in self._replicas}
        self._aliases = {}  # a name may have gone from one model to another
        for name, replicas in self._replicas.items():
            if replicas.model is not None:
                self._described[name].set()
            if name not in self._endpoints:
                self.register(ModelSource(name, name), at_startup=True)
            for model in self._endpoints[name].models:
                model.fetching = starting(len(replicas.places), replicas.min_replicas)
            # The one that serves, draining ones, and its successor.
            for pool in self._pools():
                if isinstance(pool, ClusterPool) and pool.name == name:
                    pool.follow(replicas)
            self._renew_if_outdated(name)
        # Not only once a model is loaded: a request by one of them may wake it.
        names = [(alias, name) for name, replicas in self._replicas.items() for alias in replicas.aliases]
        self._aliases = {alias: self._endpoints[name] for alias, name in names if alias not in self._endpoints}
        self._told.set()

    async def _make_pool(self, model: Model, before: WorkerPool | None = None) -> WorkerPool:
        if not self._described[model.name].is_set():
            _want(model.name)  # without a replica, Ray knows nothing of the model
        await self._described[model.name].wait()
        replicas = self._replicas[model.name]
        described = replicas.model
        assert described is not None, "the event says that it is there"
        model.source = ModelSource(described.url, model.name)
        model.resolved = resolved = _resolve(model.name, described)
        settings = _pool_settings(resolved, described, replicas, self._log_levels[""])
        before = before or self._endpoints[model.name].models[0].pool
        if isinstance(before, ClusterPool):
            settings = msgspec.structs.replace(settings, adapters=(*settings.adapters, *before.added_to(settings)))
        self._served[model.name] = described
        pool = ClusterPool(settings, self._on_metric, lambda: _want(model.name))
        pool.on_demand = OnDemand() if settings.adapter_affinity else None
        pool.store_listing = self._loader.store_listing(resolved)
        pool.replicas.update(replicas.places)
        return pool

    def _leave(self, name: str) -> None:
        """Let the requests of a model that is gone finish; no others find it."""
        coming = self._coming.pop(name, None)
        self._served.pop(name, None)
        models = [*self._endpoints[name].models, *([] if coming is None else [coming])]
        for model in models:
            self._forget(model)
        self._retiring.run(self._remove(models))

    # --- a new version of a model may have other settings ---

    def _renew_if_outdated(self, name: str) -> None:
        """Begin to make another pool for a model if replicas of a new version have other settings."""
        replicas, served = self._replicas[name], self._served.get(name)
        if replicas.model is None or served is None or replicas.model == served or name in self._coming:
            return
        self._served[name] = replicas.model
        if _without_places(replicas.model, replicas) != _without_places(served, replicas):
            before = self._endpoints[name].models[0]
            self._coming[name] = after = Model(before.source, at_startup=True)
            after.task = asyncio.create_task(self._succeed(before, after))

    async def _succeed(self, before: Model, after: Model) -> None:
        """Have `after` take the requests once it is connected; what `before` has finishes there."""
        await self._load(after)
        if self._coming.pop(before.name, None) is None:
            return  # the model is gone; `_leave` ends both
        if after.pool is not None:
            self._endpoints[before.name].models = [after]
            logger.info("model %s has the settings of its new version", before.name)
            self._retiring.run(self._end(before))
            self._renew_if_outdated(before.name)


def _without_places(described: ModelDescription, replicas: ModelReplicas) -> PoolSettings:
    """Return the settings of a pool without what differs from node to node: where the files are."""
    settings = _pool_settings(_resolve(replicas.name, described), described, replicas, "")
    adapters = tuple(_adapter(adapter.name, "") for adapter in settings.adapters)
    return msgspec.structs.replace(
        settings, load=msgspec.structs.replace(settings.load, model_dir=""), adapters=adapters
    )


def _want(name: str) -> None:
    """Tell the actor that a model needs a replica."""
    _tell(ReplicaNeeded(name))


def _tell(message: FromFrontEnd) -> None:
    """Send a message to the actor. It is dropped if the actor is gone; this process drains then."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), line(message))


def _resolve(name: str, described: ModelDescription) -> ResolvedModel:
    spec = HANDLERS.by_title(described.handler)
    options_type = cast("type[ModelOptions]", load_class(spec.options))
    options = options_type.restore(described.options, described.passed_through)
    serving = ServingOptions.model_validate(described.serving)
    return ResolvedModel(name, described.model_dir, spec, options, serving, {})


def _pool_settings(
    resolved: ResolvedModel, described: ModelDescription, replicas: ModelReplicas, log_level: str
) -> PoolSettings:
    serving, options = resolved.serving, resolved.options
    adapters = [_adapter(name, directory) for name, directory in described.adapters.items()]
    return PoolSettings(
        load=Load(
            model_name=resolved.name,
            model_dir=resolved.model_dir,
            handler=resolved.handler,
            options={},  # a replica has loaded the model by its own configuration
            served_names=list(resolved.served_names),
            log_level=log_level,
        ),
        adapters=tuple(adapters),
        min_workers=replicas.min_replicas,
        max_workers=max(1, replicas.max_replicas),
        max_in_flight=options.max_rolling_batch_size,
        max_batch_delay_s=0.0,
        job_queue_size=serving.job_queue_size,
        max_queue_delay_s=None if options.max_queue_delay_ms is None else options.max_queue_delay_ms / 1000,
        model_loading_timeout_s=options.model_loading_timeout,
        predict_timeout_s=options.predict_timeout,
        max_idle_s=serving.max_idle_time,
        sessions=resolved.has_sessions,
        parallel_loading=True,
        retry_threshold=serving.retry_threshold,
        # The end of a replica does not accuse its requests: its node may have died. The pool of the replica outlives
        # worker processes, and finds requests that end them.
        quarantine_s=0.0,
        prefix_affinity=True,
        adapter_affinity=options.adapters_on_demand,
    )


def _adapter(name: str, directory: str) -> RegisteredAdapter:
    return RegisteredAdapter(adapter=Adapter(name=name, directory=directory), source=directory)
