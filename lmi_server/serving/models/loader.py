"""Fetches models, and makes the pools of their workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from lmi_server.artifacts.fetch import ArtifactSettings
from lmi_server.artifacts.location import HubModel, parse_location
from lmi_server.artifacts.progress import show_progress
from lmi_server.configuration.checks.secure_mode import secure_mode
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.errors import ConfigurationError, ModelNotFoundError
from lmi_server.contract.metrics import Metric, MetricSink
from lmi_server.contract.progress import Progress
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.serving.adapters.adapter_store import AdapterStore, fetch_from_store
from lmi_server.serving.adapters.adapters import RegisteredAdapter
from lmi_server.serving.adapters.store_listing import StoreListing
from lmi_server.serving.models.fetch_model import FetchedModel, Inspect, fetch_directory, fetch_model
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.plan_pool import plan_pool, refuse_adapters_without_lora
from lmi_server.serving.models.reload import configuration_state
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import PoolSettings

ROLLING_BATCH = "option.rolling_batch"
_LOOK_S = 0.5  # between two looks at how far workers are
_STATIC = {ROLLING_BATCH: "disable"}


class ModelLoader:
    """Fetches models as `ModelRegistry` has them; its class says what the arguments are."""

    def __init__(
        self,
        environment: Mapping[str, str],
        artifacts: ArtifactSettings,
        inspect: Inspect,
        log_levels: Mapping[str, str],
        on_metric: MetricSink,
    ) -> None:
        self._environment = environment
        self._artifacts = artifacts
        self._inspect = inspect
        self._log_levels = log_levels
        self._on_metric = on_metric

    def measure(self, name: str, model: Model, since: float) -> None:
        """Report the microseconds since `since`, a time of time.monotonic(), under LMI's name."""
        spent = round((time.monotonic() - since) * 1e6)
        self._on_metric(Metric(name, "Microseconds", spent, (("Model", model.name),)))

    async def fetch(self, model: Model) -> FetchedModel:
        """Fetch everything that the model needs, and read its configuration. Raises LmiServerError."""
        began = time.monotonic()
        source = model.source
        try:
            location = await asyncio.to_thread(parse_location, source.url, Path.cwd())
        except ValueError as error:
            raise ModelNotFoundError(f'url = "{excerpt(SECRETS.mask(source.url), 200)}" {error}') from error
        if isinstance(location, HubModel) and "/" not in source.url and not model.at_startup:
            raise ModelNotFoundError(
                f'url = "{excerpt(source.url, 200)}" is not allowed; there is no such directory; name one, also of '
                "the model store, by its full path, or a model of the Hugging Face Hub by owner/name"
            )
        environment = {**self._environment, **source.variables}
        with show_progress(source.label, sys.stderr) as show:

            def on_progress(progress: Progress) -> None:
                model.fetching = progress
                show(progress)

            model.directory, more = await fetch_directory(location, source.url, self._artifacts, on_progress)
            model.configured_by = configuration_state(model.directory)
            settings = {**source.settings, **more, **(_STATIC if model.batches_statically else {})}
            fetched = await fetch_model(
                model.directory, environment, settings, self._artifacts, inspect=self._inspect, on_progress=on_progress
            )
        self.measure("DownloadModel", model, began)
        return replace(fetched, resolved=replace(fetched.resolved, name=model.name))

    async def until_settled(self, model: Model, pool: WorkerPool) -> None:
        """Wait until a worker has loaded the model, or none can; show meanwhile how far they are."""
        with show_progress(model.label, sys.stderr, at_once=False) as show:
            while not pool.availability.settled.is_set():
                worker = pool.roster.loading
                if worker is not None and worker.loading is not None:
                    show(worker.loading)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pool.availability.settled.wait(), _LOOK_S)

    async def make_pool(self, model: Model, fetched: FetchedModel, before: WorkerPool | None) -> WorkerPool:
        """Return the pool of a fetched model, not started yet; `before` is the one whose place it takes."""
        resolved = fetched.resolved
        settings = plan_pool(model.source, fetched, self._environment, self._log_levels)
        if before is not None:
            settings = await successor_settings(before, settings)
            refuse_adapters_without_lora(settings, resolved)
        pool = WorkerPool(settings, self._on_metric)
        store = _adapter_store(resolved)
        if store is not None:
            pool.on_demand = self._adapters_on_demand(store, pool, resolved)
            pool.store_listing = self.store_listing(resolved)
        return pool

    def _adapters_on_demand(self, store: str, pool: WorkerPool, resolved: ResolvedModel) -> AdapterStore:
        async def fetch(name: str) -> str:
            directory = await fetch_from_store(store, name, resolved.model_dir, self._artifacts)
            await asyncio.to_thread(self.refuse_unsafe_adapter, directory)
            return directory

        max_loaded, max_waiting = resolved.options.adapters_on_demand, resolved.serving.job_queue_size
        return AdapterStore(pool.adapters, fetch, pool.until_ready, max_loaded, max_waiting)

    def store_listing(self, resolved: ResolvedModel) -> StoreListing | None:
        store = _adapter_store(resolved)
        return None if store is None else StoreListing(store, resolved.model_dir, self._artifacts)

    def refuse_unsafe_adapter(self, directory: str) -> None:
        """Raise ConfigurationError if secure mode forbids the adapter in `directory`."""
        secure = secure_mode(self._environment)
        if secure is None:
            return
        if not os.path.isdir(directory):
            raise ConfigurationError(f"src = {directory} is not allowed in secure mode; allowed: a directory")
        problems = list(secure.adapter_problems(Path(directory)))
        if problems:
            raise ConfigurationError.from_problems(problems)


def _adapter_store(resolved: ResolvedModel) -> str | None:
    """Return the store from which requests bring adapters, None if they do not."""
    return resolved.options.dynamic_lora_loading_path if resolved.options.adapters_on_demand else None


async def successor_settings(pool: WorkerPool, settings: PoolSettings) -> PoolSettings:
    """Return `settings` for the successor of `pool`, with the changes by calls there.

    These are the adapters, and the numbers of workers. Adapters that requests have brought stay where they are.
    """
    return msgspec.structs.replace(
        settings,
        adapters=await _adapters_as_changed(pool, settings.adapters),
        own_adapters=settings.adapters,
        bounds=pool.scaling.bounds,
        reserved_numbers=frozenset(pool.roster.numbers.values()),
    )


async def _adapters_as_changed(pool: WorkerPool, own: Sequence[RegisteredAdapter]) -> tuple[RegisteredAdapter, ...]:
    """Return the `own` adapters of a successor, with what calls have registered, changed and removed in `pool`."""
    settings, on_demand = pool.settings, pool.on_demand
    own_before = settings.adapters if settings.own_adapters is None else settings.own_adapters
    before = {each.name: each for each in own_before}
    now = {each.name: each for each in await pool.adapters.all()}
    removed = before.keys() - now.keys()
    changed = {
        name: each
        for name, each in now.items()
        if before.get(name) != each and not (on_demand is not None and on_demand.keeps(name))
    }
    return tuple({**{each.name: each for each in own if each.name not in removed}, **changed}.values())
