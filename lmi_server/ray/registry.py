"""The models of a front end whose replicas run in a cluster. An ingress is told which there are, and where."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import cast

import msgspec

from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_class
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.protocol import Adapter, Load
from lmi_server.ray.messages import Described, Models, Replicas, Wanted, line
from lmi_server.ray.remote_replicas import ClusterPool
from lmi_server.serving.adapter_store import LoadedElsewhere
from lmi_server.serving.adapters import RegisteredAdapter
from lmi_server.serving.model_store import ModelSource
from lmi_server.serving.pool import WorkerPool
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.registry import Model, ModelRegistry

logger = logging.getLogger(__name__)

_LONGEST_LINE = 64 << 20  # a thousand replicas take 150 KiB
_ELSEWHERE = "The models of a cluster are deployed with lmi-server ray deploy"


class ClusterRegistry(ModelRegistry):
    """Registers the models of the ingress, and connects to their replicas as these come and go."""

    _replicas: Mapping[str, Replicas] = {}
    _described: Mapping[str, asyncio.Event] = {}

    async def follow(self) -> None:
        """Do what the ingress says in the lines of standard input. When it is gone, drain this process."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while told := await reader.readline():
            await self.update(msgspec.json.decode(told, type=Models))
        os.kill(os.getpid(), signal.SIGTERM)

    async def update(self, models: Models) -> None:
        """Register and unregister models so that there are these, and connect to their replicas."""
        self._replicas = {replicas.name: replicas for replicas in models.models}
        known = {model.name: model for model in self.models}
        for name in known.keys() - self._replicas.keys():
            await super().unregister(name)
        self._described = {name: self._described.get(name) or asyncio.Event() for name in self._replicas}
        for name, replicas in self._replicas.items():
            if replicas.model is not None:
                self._described[name].set()
            if name not in known:
                self.register(ModelSource(name, name), at_startup=True)
                self._claim_names(name, replicas.aliases)  # now: a request by one of them may wake the model
            elif isinstance(pool := known[name].pool, ClusterPool):
                pool.replicas.update(replicas.places)

    async def register_and_load(self, source: ModelSource) -> Model:
        raise BadParameterError(_ELSEWHERE)

    async def unregister(self, name: str, version: str | None = None) -> None:
        raise BadParameterError(_ELSEWHERE)

    async def _make_pool(self, model: Model) -> WorkerPool:
        if not self._described[model.name].is_set():
            _want(model.name)  # it may be one without a replica, of which Ray can tell nothing
        await self._described[model.name].wait()
        replicas = self._replicas[model.name]
        described = replicas.model
        assert described is not None, "the event says that it is there"
        model.source = ModelSource(described.url, model.name)
        resolved = _resolved(model.name, described)
        self._settle_configuration(model, resolved)
        settings = _pool_settings(resolved, described, replicas, self._log_levels[""])
        pool = ClusterPool(settings, self._on_metric, lambda: _want(model.name))
        pool.on_demand = LoadedElsewhere() if settings.adapter_affinity else None
        pool.replicas.update(replicas.places)
        return pool


def _want(name: str) -> None:
    """Tell the actor that a model needs a replica."""
    os.write(sys.stdout.fileno(), line(Wanted(name)))


def _resolved(name: str, described: Described) -> ResolvedModel:
    spec = HANDLERS.by_title(described.handler)
    options_type = cast("type[ModelOptions]", load_class(spec.options))
    options = options_type.restore(described.options, described.passed_through)
    serving = ServingOptions.model_validate(described.serving)
    return ResolvedModel(name, described.model_dir, spec, options, serving, {})


def _pool_settings(resolved: ResolvedModel, described: Described, replicas: Replicas, log_level: str) -> PoolSettings:
    serving, options = resolved.serving, resolved.options
    adapters = [
        RegisteredAdapter(adapter=Adapter(name=name, directory=directory), source=directory)
        for name, directory in described.adapters.items()
    ]
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
        parallel_loading=True,
        retry_threshold=serving.retry_threshold,
        # A replica that ends says nothing of its requests: its node may have died, or somebody has killed it. Requests
        # that end worker processes are found by the pool of the replica, which outlives them.
        quarantine_s=0.0,
        prefix_affinity=True,
        adapter_affinity=options.adapters_on_demand,
    )
