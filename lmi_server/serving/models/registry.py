"""The models of a server: registered, loaded, loaded again, and unregistered.

Each version of a model has its own configuration, devices, workers, queue and failure. Everything but the reading of
files runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lmi_server.artifacts.fetch import ArtifactSettings
from lmi_server.configuration.layers import DERIVED
from lmi_server.contract.errors import (
    ConfigurationError,
    LmiServerError,
    ModelLoadError,
    ModelNotFoundError,
    ModelNotReadyError,
    RollingBatchError,
)
from lmi_server.contract.metrics import MetricSink, drop_metric
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.serving.models.catalog import ModelCatalog
from lmi_server.serving.models.fetch_model import Inspect
from lmi_server.serving.models.loader import ROLLING_BATCH, ModelLoader
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_memory import MemoryRoom
from lmi_server.serving.models.model_store import HUB_VARIABLES, ModelSource
from lmi_server.serving.models.reload import Reload
from lmi_server.serving.pool.retirement import RetiringPools
from lmi_server.serving.pool.worker_pool import SHUTTING_DOWN, WORKER_STOP_S, WorkerPool
from lmi_server.supervisor.log import LEVELS

logger = logging.getLogger(__name__)

Proof = Callable[[Model], Awaitable[None]]
"""Returns once a newly loaded model may replace the running one; raises LmiServerError if it may not."""

_RELOAD_DRAIN_S = 600.0  # for the requests of the workers that a reload replaces; as when a model is scaled down


class ModelRegistry(ModelCatalog):
    """Every model of a server, from its registration to its end.

    `environment` has the variables that configure models; `inspect` reads the configuration of one. The requests of an
    unregistered model get `drain_timeout_s` seconds to finish. `on_metric` gets the metrics that workers print, and the
    times of fetching and loading a model.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        artifacts: ArtifactSettings,
        inspect: Inspect,
        drain_timeout_s: float,
        log_level: str = "INFO",
        on_metric: MetricSink = drop_metric,
    ) -> None:
        super().__init__()
        self.artifacts = artifacts
        self._environment = {name: value for name, value in environment.items() if name not in HUB_VARIABLES}
        self._drain_timeout_s = drain_timeout_s
        self._log_levels = {"": log_level}
        self._on_metric = on_metric
        self._loader = ModelLoader(self._environment, artifacts, inspect, self._log_levels, on_metric)
        self.refuse_unsafe_adapter = self._loader.refuse_unsafe_adapter
        self.room = MemoryRoom(self._environment, lambda: self.models, lambda model: self._remove([model]))
        self._retiring = RetiringPools()  # of models that are unregistered, or have another pool now
        self._coming: dict[str, Model] = {}  # what is to take the place of a model, by the model's label
        self._draining = False

    # --- registration ---

    def register(self, source: ModelSource, at_startup: bool = False) -> Model:
        """Add a model and begin to load it.

        Raises ModelExistsError if it is registered already, ModelNotReadyError if the server ends.
        """
        self._refuse_if_draining()
        model = Model(source, at_startup)
        self._add(model)
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
            raise _unregistered_error(model)
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
            self._forget(model)  # first: no request finds a model that is about to end
        await asyncio.gather(*(self._end(model) for model in models))

    async def _end(self, model: Model) -> None:
        if model.task is not None and not model.task.done():
            model.task.cancel()
            await asyncio.gather(model.task, return_exceptions=True)
        if model.pool is not None:
            await self._retiring.end(model.pool, self._drain_timeout_s, f"Model {model.label} is unregistered")

    # --- loading again ---

    async def reload(self, name: str, version: str | None = None) -> list[Model]:
        """Load one version of a model again, or all of them one after the other, and return them.

        The version "" is the model without a version, which may stand beside others.
        Each is loaded from its source, with the configuration as it is now, beside the workers that serve it. Once
        there are enough new workers, they get the requests; accepted requests finish where they are. If the model
        cannot be loaded, it serves on as before, and the reason is raised.
        """
        endpoint = self.endpoint(name)
        models = list(endpoint.models) if version is None else [endpoint.version(version or None)]
        for model in models:
            await self.reload_model(model)
        return models

    async def reload_model(self, model: Model, prove: Proof | None = None) -> None:
        """Load one version of a model again as `reload` does; after a load that has begun already.

        With `prove` the new workers get the requests once that has returned. Its error is why they do not.
        """
        await model.settled.wait()
        await model.until_reloaded()
        if model not in self.models:
            raise _unregistered_error(model)
        self._refuse_if_draining()
        after = Model(model.source, model.at_startup)
        model.reload = reload = Reload(lambda: after.loading)
        model.task = asyncio.create_task(self._reload(model, after, reload, prove))
        await reload.wait()
        if reload.failure is not None:
            raise reload.failure

    async def _reload(self, model: Model, after: Model, reload: Reload, prove: Proof | None) -> None:
        logger.info("model %s: loading it again beside its workers", model.label)
        self._coming[model.label] = after
        failure: LmiServerError | None = _unregistered_error(model)  # unless something else happens
        try:
            after.pool = await self._make_pool(after, model.pool)
            after.pool.start()
            if after.pool.availability.may_have_workers:  # otherwise `complete` says why not
                await self._loader.until_settled(after, after.pool)
            try:
                await after.pool.complete()
            except RollingBatchError as error:
                await self._batch_statically(after, error, model.pool)
                await after.pool.complete()
            if prove is not None:
                await prove(after)
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
            self._retiring.begin(after.pool, 0.0, failure.message)

    def _replace(self, model: Model, after: Model) -> None:
        """Have `model` served as `after` is; what its workers hold finishes there."""
        assert after.resolved is not None
        assert after.pool is not None
        self.refuse_taken_names(model.name, after.resolved.options.served_model_name)  # others may have come meanwhile
        before = model.pool
        model.pool, model.resolved, model.directory, model.failed = after.pool, after.resolved, after.directory, None
        self.renew_aliases(model.name)
        if before is not None:
            self._retiring.begin(before, _RELOAD_DRAIN_S, f"Model {model.label} has other workers now")

    # --- loading ---

    async def _load(self, model: Model) -> None:
        began = time.monotonic()
        try:
            model.pool = await self._make_pool(model)
            made_at = time.monotonic()
            model.pool.start()
            await self._loader.until_settled(model, model.pool)
            if isinstance(model.failure, RollingBatchError):
                await self._batch_statically(model, model.failure)
            if model.failure is None:
                self._loader.measure("LoadModel", model, made_at)
                self._loader.measure("RegisterWorkflow", model, began)
        except LmiServerError as error:
            _fail(model, error)
        except Exception as error:  # the border to users' files, which may raise anything; the model fails with it
            logger.exception("model %s cannot be read", model.label)
            _fail(model, ModelLoadError(f"{type(error).__name__}: {error}"))
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
        if refused.sources[ROLLING_BATCH].layer not in DERIVED:
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
            model.label, refusal, ROLLING_BATCH,
        )  # fmt: skip
        model.pool.start()
        await self._loader.until_settled(model, model.pool)

    async def _make_pool(self, model: Model, before: WorkerPool | None = None) -> WorkerPool:
        """Fetch `model` and return its pool, not started yet; `before` is the pool whose place it takes.

        Raises LmiServerError, such as ConfigurationError if another model has one of its names.
        """
        fetched = await self._loader.fetch(model)
        resolved = fetched.resolved
        self.refuse_taken_names(model.name, resolved.options.served_model_name)
        model.resolved = resolved
        self.renew_aliases(model.name)
        for warning in resolved.warnings:
            logger.warning("model %s: %s", model.label, warning)
        await self.room.make(model, resolved)
        return await self._loader.make_pool(model, fetched, before)

    def set_log_level(self, level: str, name: str = "") -> None:
        """Set the level ("INFO", ...) of the logger `name` in this process and every worker, present and future.

        Without a name it applies to all loggers without a level of their own.
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
        """End every worker within `limit_s` seconds, and kill what is left then."""
        loading = [model.task for model in self.models if model.task is not None and not model.task.done()]
        for task in loading:
            task.cancel()
        if loading:
            await asyncio.wait(loading, timeout=limit_s)
        await asyncio.gather(*(pool.stop(limit_s) for pool in self._pools()))

    def kill(self) -> None:
        """End every worker at once."""
        for pool in self._pools():
            pool.roster.kill()

    def _pools(self) -> list[WorkerPool]:
        models = [*self.models, *self._coming.values()]
        return [*(model.pool for model in models if model.pool is not None), *self._retiring]


def _fail(model: Model, error: LmiServerError) -> None:
    logger.error("model %s could not be loaded: %s", model.label, error)
    model.failed = error.with_traceback(None)  # its frames would keep the lease of an engine's environment


def _unregistered_error(model: Model) -> ModelNotFoundError:
    return ModelNotFoundError(f"Model {model.label} was unregistered while it was loading")
