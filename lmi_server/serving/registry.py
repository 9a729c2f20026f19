"""The models of a server: registered, loaded, chosen by name and version, loaded again, and unregistered.

Each version of a model has its own configuration, devices, workers, queue and failure. Everything but the reading of
files runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi_server.artifacts.fetch import ArtifactSettings
from lmi_server.artifacts.location import HubModel, parse_location
from lmi_server.artifacts.progress import OnProgress, Progress, show_progress
from lmi_server.configuration.checks.secure_mode import secure_mode
from lmi_server.configuration.layers import DERIVED
from lmi_server.configuration.resolve import ResolvedModel
from lmi_server.contract.errors import (
    ConfigurationError,
    LmiServerError,
    ModelExistsError,
    ModelLoadError,
    ModelMemoryError,
    ModelNotFoundError,
    ModelNotReadyError,
    RollingBatchError,
)
from lmi_server.contract.metrics import Metric, MetricSink, unrecorded
from lmi_server.contract.quoting import excerpt
from lmi_server.machine.environment import is_multi_model
from lmi_server.serving.adapter_store import AdapterStore, fetch_from_store
from lmi_server.serving.fetch_model import FetchedModel, Inspect, fetch_directory, fetch_model
from lmi_server.serving.model_memory import memory_shortage
from lmi_server.serving.model_store import HUB_VARIABLES, ModelSource
from lmi_server.serving.models import Endpoint, Model
from lmi_server.serving.plan_pool import plan_pool, refuse_adapters_without_lora
from lmi_server.serving.pool import SHUTTING_DOWN, WORKER_STOP_S, WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.serving.reload import Reload, configuration_state
from lmi_server.serving.store_listing import StoreListing
from lmi_server.supervisor.log import LEVELS

logger = logging.getLogger(__name__)

_ROLLING_BATCH = "option.rolling_batch"
_STATIC = {_ROLLING_BATCH: "disable"}
_RELOAD_DRAIN_S = 600.0  # for the requests of the workers that a reload replaces; as when a model is scaled down


class ModelRegistry:
    """Every model of a server.

    `environment` has the variables that configure models; `inspect` reads the configuration of one. The requests of an
    unregistered model get `drain_timeout_s` seconds to finish. `on_metric` gets the metrics that workers print, and
    the times that fetching and loading a model took.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        artifacts: ArtifactSettings,
        inspect: Inspect,
        drain_timeout_s: float,
        log_level: str = "INFO",
        on_metric: MetricSink = unrecorded,
    ) -> None:
        self.only: Endpoint | None = None
        self.default: Endpoint | None = None
        self.unloads_idle = False  # models without requests, if another one finds too little memory
        self._environment = {name: value for name, value in environment.items() if name not in HUB_VARIABLES}
        self.artifacts = artifacts
        self._inspect = inspect
        self._drain_timeout_s = drain_timeout_s
        self._log_levels = {"": log_level}
        self._on_metric = on_metric
        self._endpoints: dict[str, Endpoint] = {}
        self._aliases: dict[str, Endpoint] = {}
        self._ending: set[WorkerPool] = set()  # of models that are unregistered, or have another pool now
        self._coming: dict[str, Model] = {}  # what is to take the place of a model, by the model's label
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    async def follow(self) -> None:
        """Follow what another process says of the models. Nobody does of the models of a single server."""

    async def until_told(self) -> None:
        """Return once it is known which models there are; a single server knows it from the start."""

    def refuse_if_untold(self) -> None:
        """Raise ModelNotReadyError while it is not known which models there are."""

    # --- look-ups ---

    @property
    def endpoints(self) -> list[Endpoint]:
        """Return every model with its versions, by name."""
        return [self._endpoints[name] for name in sorted(self._endpoints)]

    @property
    def models(self) -> list[Model]:
        return [model for endpoint in self.endpoints for model in endpoint.models]

    @property
    def names(self) -> list[str]:
        """Return every name under which requests may ask for a model: each model's own name, then its aliases."""
        return [name for endpoint in self.endpoints for name in self._names_of(endpoint)]

    def has(self, name: str) -> bool:
        """Return whether a model or an adapter has that name."""
        own = name in self._endpoints or name in self._aliases
        return own or any(model.pool is not None and name in model.pool.adapters for model in self.models)

    def _names_of(self, endpoint: Endpoint) -> Iterator[str]:
        yield endpoint.name
        yield from (alias for alias, target in self._aliases.items() if target is endpoint)

    def endpoint(self, name: str) -> Endpoint:
        """Return the model of that name or alias. Raises ModelNotFoundError."""
        endpoint = self._endpoints.get(name) or self._aliases.get(name)
        if endpoint is None:
            self.refuse_if_untold()
            raise ModelNotFoundError(f"Model or workflow not found: {excerpt(name)}")
        return endpoint

    def named_as_model(self, name: str, version: str | None = None) -> Model:
        """Return the model that an OpenAI request means by `model`, which may also be the name of an adapter."""
        for model in () if name in self._endpoints or name in self._aliases else self.models:
            if model.pool is not None and name in model.pool.adapters and version in (None, model.version):
                return model
        base, _, adapter = name.rpartition(":")
        if adapter and base in self.names and name not in self.names:
            return self.named(base, version)  # model:adapter, as with Ray Serve LLM; the worker knows its adapters
        return self.named(name, version)

    def named(self, name: str, version: str | None = None) -> Model:
        """Return the model that a request names. Raises ModelNotFoundError."""
        return self.endpoint(name).choose(version)

    def reads_by_code(self, model: Model) -> bool:
        """Return whether code of the user may read the bodies for `model`, and so take any name of a model in them."""
        return model.runs_user_code or model.has_code

    @property
    def startup_statuses(self) -> set[ModelStatus]:
        """Return the statuses that models of the start have."""
        return {model.status for model in self.models if model.at_startup}

    def refuse_unsafe_adapter(self, directory: str) -> None:
        """Raise ConfigurationError if secure mode forbids the adapter in `directory`."""
        secure = secure_mode(self._environment)
        if secure is None:
            return
        if not os.path.isdir(directory):
            raise ConfigurationError(f"src = {directory} is not allowed in secure mode; allowed: a directory")
        problems = list(secure.adapter_problems(Path(directory)))
        if problems:
            raise ConfigurationError("\n".join(problems))

    # --- registration ---

    def register(self, source: ModelSource, at_startup: bool = False) -> Model:
        """Add a model and begin to load it.

        Raises ModelExistsError if it is registered already, ModelNotReadyError if the server ends.
        """
        self._refuse_if_draining()
        endpoint = self._endpoints.get(source.name) or Endpoint(source.name)
        # Nothing could name a model without a version that stands beside its versions.
        taken = any(model.label == source.label for model in self.models)
        if taken or source.name in self._aliases or (source.version is None and endpoint.models):
            raise ModelExistsError(f"Workflow {source.label} is already registered.")
        model = Model(source, at_startup)
        endpoint.models.append(model)
        self._endpoints[source.name] = endpoint
        self._choose_default()
        model.task = asyncio.create_task(self._load(model))
        return model

    async def register_and_load(self, source: ModelSource) -> Model:
        """Add a model and wait until it is loaded. If it cannot be loaded, remove it and raise the reason."""
        model = self.register(source)
        await model.settled.wait()
        if model.failure is not None:
            await self._remove([model])
            raise model.failure
        if model.pool is None or model not in self.models:
            raise _unregistered(model)
        return model

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Remove one version of a model, or all of them; return once their workers have ended.

        The version "" is the model without a version, which may stand beside others. Requests that were accepted finish
        first, within `drain_timeout_s`. Raises ModelNotFoundError.
        """
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            raise ModelNotFoundError(f"Model or workflow not found: {excerpt(name)}")
        await self._remove([endpoint.version(version or None)] if version is not None else list(endpoint.models))

    async def _remove(self, models: Sequence[Model]) -> None:
        for model in models:
            self._forget(model)  # first, so that no request finds a model that is about to end
        await asyncio.gather(*(self._end(model) for model in models))

    def _forget(self, model: Model) -> None:
        endpoint = self._endpoints.get(model.name)
        if endpoint is None or model not in endpoint.models:
            return
        endpoint.models.remove(model)
        if not endpoint.models:
            del self._endpoints[model.name]
            self._aliases = {alias: target for alias, target in self._aliases.items() if target is not endpoint}
        self._choose_default()
        logger.info("model %s is unregistered", model.label)

    async def _end(self, model: Model) -> None:
        if model.task is not None and not model.task.done():
            model.task.cancel()
            await asyncio.gather(model.task, return_exceptions=True)
        if model.pool is not None:
            await self._end_pool(model.pool, self._drain_timeout_s, f"Model {model.label} is unregistered")

    def _retire(self, pool: WorkerPool, drain_timeout_s: float, reason: str) -> None:
        """Begin to end a pool that no model has any more."""
        self._ending.add(pool)
        self._begin(self._end_pool(pool, drain_timeout_s, reason))

    async def _end_pool(self, pool: WorkerPool, drain_timeout_s: float, reason: str) -> None:
        self._ending.add(pool)  # `stop` and `kill` must still reach its workers while it drains
        await pool.drain(drain_timeout_s, reason)
        await pool.stop()
        self._ending.discard(pool)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in a task that nobody has to wait for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _choose_default(self) -> None:
        """Choose the model for requests that name none: the only one from the start of the server, or the only one."""
        everyone = list(self._endpoints.values())
        at_startup = [endpoint for endpoint in everyone if any(model.at_startup for model in endpoint.models)]
        self.only = everyone[0] if len(everyone) == 1 else None
        self.default = at_startup[0] if len(at_startup) == 1 else self.only

    # --- loading again ---

    async def reload(self, name: str, version: str | None = None) -> list[Model]:
        """Load one version of a model again, or all of them one after the other, and return them.

        Each is loaded from its source, with the configuration as it is now, beside the workers that serve it. Once
        that has as many workers as it needs, it gets the requests; those that were accepted finish where they are. If
        it cannot be loaded, the model serves on as before, and the reason is raised.
        """
        endpoint = self.endpoint(name)
        models = list(endpoint.models) if version is None else [endpoint.version(version)]
        for model in models:
            await self.reload_model(model)
        return models

    async def reload_model(self, model: Model) -> None:
        """Load one version of a model again as `reload` does; after a load that has begun already."""
        await model.settled.wait()
        await model.until_reloaded()
        if model not in self.models:
            raise _unregistered(model)
        self._refuse_if_draining()
        model.reload = reload = Reload()
        model.task = asyncio.create_task(self._reload(model, reload))
        await reload.ended()
        if reload.failure is not None:
            raise reload.failure

    async def _reload(self, model: Model, reload: Reload) -> None:
        logger.info("model %s: loading it again beside its workers", model.label)
        self._coming[model.label] = after = Model(model.source, model.at_startup)
        failure: LmiServerError | None = _unregistered(model)  # unless something else happens
        try:
            after.pool = await self._make_pool(after, model.pool)
            after.pool.start()
            try:
                await after.pool.complete()
            except RollingBatchError as error:
                await self._batch_statically(after, error, model.pool)
                await after.pool.complete()
            self._replace(model, after)
            failure = None
        except LmiServerError as error:
            failure = error
        except asyncio.CancelledError:
            if self._draining:
                failure = ModelNotReadyError(SHUTTING_DOWN)
            raise
        except Exception as error:  # the border to users' files, as in `_load`
            logger.exception("model %s cannot be read", model.label)
            failure = ModelLoadError(f"{type(error).__name__}: {error}")
        finally:
            self._end_reload(model, after, reload, failure)

    def _end_reload(self, model: Model, after: Model, reload: Reload, failure: LmiServerError | None) -> None:
        del self._coming[model.label]
        model.configured_by = after.configured_by or model.configured_by
        reload.end(failure)
        model.reloads[reload.status] += 1
        if failure is None:
            logger.info("model %s is loaded again; its new workers get the requests", model.label)
            return
        if model.pool is None:
            model.failed = failure
        logger.error("model %s could not be loaded again, and stays as it was: %s", model.label, failure)
        if after.pool is not None:
            self._retire(after.pool, 0.0, failure.message)

    def _replace(self, model: Model, after: Model) -> None:
        """Have `model` served as `after` is; what its workers hold finishes there."""
        assert after.resolved is not None
        assert after.pool is not None
        self._refuse_taken_names(model.name, after.resolved.options.served_model_name)  # others may have come meanwhile
        before = model.pool
        model.pool, model.resolved, model.directory, model.failed = after.pool, after.resolved, after.directory, None
        self._renew_aliases(self._endpoints[model.name])
        if before is not None:
            self._retire(before, _RELOAD_DRAIN_S, f"Model {model.label} has other workers now")

    # --- loading ---

    async def _load(self, model: Model) -> None:
        began = time.monotonic()
        try:
            model.pool = await self._make_pool(model)
            made_at = time.monotonic()
            model.pool.start()
            await model.pool.settled()
            if isinstance(model.failure, RollingBatchError):
                await self._batch_statically(model, model.failure)
            if model.failure is None:
                self._measure("LoadModel", model, made_at)
                self._measure("RegisterWorkflow", model, began)
        except LmiServerError as error:
            self._fail(model, error)
        except Exception as error:  # the border to users' files, which may raise anything; the model fails with it
            logger.exception("model %s cannot be read", model.label)
            self._fail(model, ModelLoadError(f"{type(error).__name__}: {error}"))
        finally:
            model.settled.set()

    async def _batch_statically(
        self, model: Model, refusal: RollingBatchError, before: WorkerPool | None = None
    ) -> None:
        """Load a model in static batches that the rolling batch has refused. Raises `refusal` if it cannot be.

        It cannot if the configuration names a rolling batch, or if its handler has no static batches.
        """
        failed, refused = model.pool, model.resolved
        assert failed is not None
        assert refused is not None
        if refused.sources[_ROLLING_BATCH].layer not in DERIVED:
            raise refusal
        model.pool, model.batches_statically = None, True
        await failed.stop()
        try:
            model.pool = await self._make_pool(model, before)
        except ConfigurationError:
            raise refusal from None
        if model.resolved is None or model.resolved.spec is refused.spec:
            model.pool = None
            raise refusal
        logger.warning(
            "model %s is loaded again, for static batches: %s; %s=disable says so without this warning",
            model.label, refusal, _ROLLING_BATCH,
        )  # fmt: skip
        model.pool.start()
        await model.pool.settled()

    async def _make_pool(self, model: Model, before: WorkerPool | None = None) -> WorkerPool:
        """Fetch `model` and return its pool, not started yet, which may take the place of another one.

        Raises LmiServerError.
        """
        began = time.monotonic()
        fetched = await self._fetch(model)
        self._measure("DownloadModel", model, began)
        fetched = replace(fetched, resolved=replace(fetched.resolved, name=model.name))
        self._settle_configuration(model, fetched.resolved)
        await self._make_room(model, fetched.resolved)
        settings = plan_pool(model.source, fetched, self._environment, self._log_levels)
        if before is not None:
            settings = await before.succeed(settings)
            refuse_adapters_without_lora(settings, fetched.resolved)
        pool = WorkerPool(settings, self._on_metric)
        pool.on_demand = self._adapter_store(pool, fetched.resolved)
        pool.store_listing = self._store_listing(fetched.resolved)
        return pool

    def _adapter_store(self, pool: WorkerPool, resolved: ResolvedModel) -> AdapterStore | None:
        options = resolved.options
        store = options.dynamic_lora_loading_path
        if store is None or not options.adapters_on_demand:
            return None

        async def fetch(name: str) -> str:
            directory = await fetch_from_store(store, name, resolved.model_dir, self.artifacts)
            await asyncio.to_thread(self.refuse_unsafe_adapter, directory)
            return directory

        max_waiting = resolved.serving.job_queue_size
        return AdapterStore(pool.adapters, fetch, pool.until_ready, options.adapters_on_demand, max_waiting)

    def _store_listing(self, resolved: ResolvedModel) -> StoreListing | None:
        store = resolved.options.dynamic_lora_loading_path
        is_store = store is not None and resolved.options.adapters_on_demand
        return StoreListing(store or "", resolved.model_dir, self.artifacts) if is_store else None

    def _settle_configuration(self, model: Model, resolved: ResolvedModel) -> None:
        """Record the configuration of `model`. Raises ConfigurationError if another model has one of its names."""
        self._refuse_taken_names(model.name, resolved.options.served_model_name)
        model.resolved = resolved
        self._renew_aliases(self._endpoints[model.name])
        for warning in resolved.warnings:
            logger.warning("model %s: %s", model.label, warning)

    def _measure(self, name: str, model: Model, since: float) -> None:
        """Report the microseconds since `since`, a time of time.monotonic(), under LMI's name."""
        spent = round((time.monotonic() - since) * 1e6)
        self._on_metric(Metric(name, "Microseconds", spent, (("Model", model.name),)))

    async def _make_room(self, model: Model, resolved: ResolvedModel) -> None:
        """Raise ModelMemoryError if less memory is free than `model` asks for, and unloading others does not help.

        SageMaker's multi-model endpoints load models until the server answers 507, and unload others then. So the need
        of a model that does not say it is estimated there.
        """
        estimates = self.unloads_idle or is_multi_model(self._environment)
        while shortage := await asyncio.to_thread(memory_shortage, resolved, self._environment, estimates):
            held = [each.resolved for each in self._idle_models() if each.resolved is not None]
            lacking = await asyncio.to_thread(memory_shortage, resolved, self._environment, estimates, held)
            idle = self._idle_models()
            if lacking or not idle:
                raise ModelMemoryError(shortage)
            logger.warning("model %s is unloaded to make room for model %s: %s", idle[0].label, model.label, shortage)
            await self._remove(idle[:1])

    def _idle_models(self) -> list[Model]:
        """Return the models that may be unloaded to make room, the one without a request for longest first."""
        idle = [
            (model.pool.used_at, model)
            for model in self.models
            if self._may_be_unloaded(model) and model.pool is not None and model.pool.is_idle
        ]
        return [model for _, model in sorted(idle, key=lambda pair: pair[0])]

    def _may_be_unloaded(self, model: Model) -> bool:
        return self.unloads_idle and not model.at_startup and not model.is_reloading

    def _fail(self, model: Model, error: LmiServerError) -> None:
        logger.error("model %s could not be loaded: %s", model.label, error)
        model.failed = error

    async def _fetch(self, model: Model) -> FetchedModel:
        """Fetch everything that the model needs, and read its configuration."""
        source = model.source
        try:
            location = await asyncio.to_thread(parse_location, source.url, Path.cwd())
        except ValueError as error:
            raise ModelNotFoundError(f'url = "{excerpt(source.url, 200)}" {error}') from error
        if isinstance(location, HubModel) and "/" not in source.url and not model.at_startup:
            raise ModelNotFoundError(
                f'url = "{excerpt(source.url, 200)}" is not allowed; there is no such directory; a registration '
                "names one, also of the model store, by its full path, and a model of the Hugging Face Hub by "
                "owner/name"
            )
        environment = {**self._environment, **source.variables}
        with show_progress(source.label, sys.stderr) as show:
            on_progress = _recorded(model, show)
            model.directory, more = await fetch_directory(location, source.url, self.artifacts, on_progress)
            model.configured_by = configuration_state(model.directory)
            settings = {**source.settings, **more, **(_STATIC if model.batches_statically else {})}
            return await fetch_model(
                model.directory, environment, settings, self.artifacts, inspect=self._inspect, on_progress=on_progress
            )

    def _refuse_taken_names(self, name: str, aliases: Sequence[str]) -> None:
        endpoint = self._endpoints[name]
        for alias in aliases:
            owner = self._endpoints.get(alias) or self._aliases.get(alias) or endpoint
            if owner is not endpoint:
                raise ConfigurationError(
                    f'option.served_model_name = "{alias}" is a name of model {owner.name}; choose another'
                )

    def _renew_aliases(self, endpoint: Endpoint) -> None:
        """Give a model the names that the configurations of its versions have now."""
        given = [model.resolved.options.served_model_name for model in endpoint.models if model.resolved is not None]
        others = {alias: target for alias, target in self._aliases.items() if target is not endpoint}
        self._aliases = others | {alias: endpoint for names in given for alias in names if alias != endpoint.name}

    def set_log_level(self, level: str, name: str = "") -> None:
        """Set the level ("INFO", ...) of the logger `name` in this process and every worker, present and future.

        Without a name it is that of all loggers that have none of their own.
        """
        logging.getLogger(name).setLevel(level)
        self._log_levels[name] = level
        if name:
            LEVELS[name] = logging.getLogger(name).level
        for pool in self._pools():
            pool.set_log_level(level, name)

    # --- the end ---

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more; let requests that were accepted finish within `timeout_s` seconds.

        Models that are being loaded fail at once: nothing could be served with them.
        """
        self._draining = True
        for model in self.models:
            if model.task is not None and not model.task.done():
                model.task.cancel()
                if not model.settled.is_set():
                    model.failed = ModelNotReadyError(SHUTTING_DOWN)
                    model.settled.set()  # the task may wait for a thread that reads files
        await asyncio.gather(*(pool.drain(timeout_s) for pool in self._pools()))

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise ModelNotReadyError(SHUTTING_DOWN)

    async def stop(self, limit_s: float = WORKER_STOP_S) -> None:
        """End every worker within `limit_s` seconds; those that are left then are killed."""
        loading = [model.task for model in self.models if model.task is not None and not model.task.done()]
        for task in loading:
            task.cancel()
        if loading:
            await asyncio.wait(loading, timeout=limit_s)
        await asyncio.gather(*(pool.stop(limit_s) for pool in self._pools()))

    def kill(self) -> None:
        """End every worker at once."""
        for pool in self._pools():
            pool.kill()

    def _pools(self) -> list[WorkerPool]:
        models = [*self.models, *self._coming.values()]
        return [*(model.pool for model in models if model.pool is not None), *self._ending]


def _recorded(model: Model, show: OnProgress) -> OnProgress:
    """Return a callback that shows progress and keeps it with the model."""

    def report(progress: Progress) -> None:
        model.progress = progress
        show(progress)

    return report


def _unregistered(model: Model) -> ModelNotFoundError:
    return ModelNotFoundError(f"Model {model.label} was unregistered while it was loading")
