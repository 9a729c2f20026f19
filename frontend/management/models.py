"""LMI's management API, which lists, registers, describes, scales, reloads and unregisters models over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from frontend.access.registration_limits import RegistrationLimits
from frontend.http.clients import Scope
from frontend.http.parameters import check_name, integer, page, parameters, truth
from frontend.http.responses import json_response
from lmi_server.artifacts.location import NO_WORKFLOWS, archive_stem
from lmi_server.configuration.options import MAX_WORKERS
from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.protocol import LOG_OFF
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS, mask_url
from lmi_server.serving.models.model import Endpoint, Model
from lmi_server.serving.models.model_store import ModelSource, name_of, named_by_file
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.supervisor.replicas import Replicas

_UNCHANGED = -1
_ALL_DEVICES = "*"
_MAX_DIGITS = 6  # of the number of a device; int() refuses very long texts
LONGEST_WORK = 200  # characters of what a model does while it loads
_DEFAULTS = ("0", "-1")  # numbers that mean "as configured" in a registration, as in LMI

# Parameters of a registration that stand for a key of serving.properties.
_SETTINGS = {
    "engine": "engine",
    "device": "load_on_devices",
    "batch_size": "batch_size",
    "job_queue_size": "job_queue_size",
    "max_batch_delay": "max_batch_delay",
    "max_idle_time": "max_idle_time",
    "min_worker": "minWorkers",
    "max_worker": "maxWorkers",
}
# The levels of Python's logging, by the names of those of LMI's logger.
_LOG_LEVELS = {
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "warning": "WARNING",
    "error": "ERROR",
    "fatal": "CRITICAL",
    "off": LOG_OFF,
}
_LISTED_STATUS = {ModelStatus.PENDING: "PENDING", ModelStatus.FAILED: "FAILED"}

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Management:
    """The endpoints. Each raises LmiServerError, which the application turns into an answer."""

    def __init__(self, models: ModelRegistry, limits: RegistrationLimits) -> None:
        self._models = models
        self._limits = limits

    def routes(self) -> list[Route]:
        """Return the routes. LMI accepts "workflows" in place of "models"."""
        one = {"GET": self.describe, "PUT": self.scale, "DELETE": self.unregister}
        return [
            MethodRoute("/models", {"GET": self.list_models, "POST": self.register}),
            MethodRoute("/workflows", {"GET": self.list_workflows, "POST": self.register}),
            *(
                MethodRoute(f"/{kind}/{{model}}{version}/reload", {"POST": self.reload})
                for kind in ("models", "workflows")
                for version in ("", "/{version}")
            ),
            MethodRoute("/server/logging", dict.fromkeys(("GET", "POST", "PUT"), self.set_log_level)),
            *(
                MethodRoute(f"/{kind}/{{model}}{version}", one)
                for kind in ("models", "workflows")
                for version in ("", "/{version}")
            ),
        ]

    async def list_models(self, request: Request) -> Response:
        page, more = self._page(request)
        rows = [
            {
                "modelName": model.name,
                **_version(model),
                "modelUrl": _url(model),
                "status": _LISTED_STATUS.get(model.status, "READY"),
            }
            for endpoint in page
            for model in endpoint.models
        ]
        return json_response({**more, "models": rows})

    async def list_workflows(self, request: Request) -> Response:
        page, more = self._page(request)
        rows = [{"workflowName": model.name, **_version(model)} for endpoint in page for model in endpoint.models]
        return json_response({**more, "workflows": rows})

    def _page(self, request: Request) -> tuple[Sequence[Endpoint], dict[str, str]]:
        return page(request.query_params, self._models.endpoints)

    async def register(self, request: Request) -> Response:
        given = await parameters(request)
        source = await asyncio.to_thread(self._source, given, request.scope)
        if truth(given, "synchronous", True):
            await to_the_end(self._models.register_and_load(source))
            return json_response({"status": f'Model "{source.name}" registered.'})
        self._models.register(source)
        answer = json_response({"status": f'Model "{source.name}" registration scheduled.'}, 202)
        answer.headers["location"] = _address(source)
        return answer

    def _source(self, given: Mapping[str, str], scope: Scope) -> ModelSource:
        """Return the model to register. Raises PermissionDeniedError before a file is read that it may not name."""
        source = self._limits.check_model(model_source(given), scope)
        return source if given.get("model_name") else named_by_file(source)

    async def describe(self, request: Request) -> Response:
        return json_response([_description(model) for model in self._named_versions(request)])

    async def scale(self, request: Request) -> Response:
        given = await parameters(request)
        min_workers, max_workers = _count(given, "min_worker"), _count(given, "max_worker")
        device = _device(given)
        models = self._named_versions(request)
        for model in models:
            await model.until_reloaded()
        pools = [model.loaded() for model in models]
        await asyncio.gather(*(pool.scale(min_workers, max_workers, device) for pool in pools))
        lines = [
            f'Workflow "{model.name}" worker scaled. New Worker configuration '
            f"min workers:{sum(replicas.min_workers for replicas in pool.replica_sets)} "
            f"max workers:{sum(replicas.max_workers for replicas in pool.replica_sets)}"
            for model, pool in zip(models, pools, strict=True)
        ]
        return json_response({"status": "\n".join(lines)})

    async def reload(self, request: Request) -> Response:
        """Load a model again beside itself, with its configuration as it is now; then that gets the requests."""
        name, version = _name_and_version(request)
        waits = truth(await parameters(request), "synchronous", True)
        self._named_versions(request)  # so that an unknown name is refused at once
        reloading = asyncio.ensure_future(self._models.reload(name, version))
        if waits:
            await asyncio.shield(reloading)  # it goes on if the client goes away
            return json_response({"status": f'Model "{name}" reloaded.'})
        reloading.add_done_callback(_retrieve_error)
        return json_response({"status": f'Model "{name}" reload scheduled.'}, 202)

    async def unregister(self, request: Request) -> Response:
        """Unregister a version, or all."""
        name, version = _name_and_version(request)
        await to_the_end(self._models.unregister(name, version))
        return json_response({"status": f'Model or workflow "{name}" unregistered'})

    async def set_log_level(self, request: Request) -> Response:
        """Set the log level of this process and of all workers; the default is "info".

        `logger` names a module ("frontend.relay.relay", "vllm"): the level holds for the logger and all below it.
        """
        given = request.query_params.get("level", "").strip().lower() or "info"
        level = _LOG_LEVELS.get(given)
        if level is None:
            raise BadParameterError(f'Parameter level is "{excerpt(given)}"; it takes {", ".join(_LOG_LEVELS)}')
        self._models.set_log_level(level, request.query_params.get("logger", "").strip())
        return json_response({"status": "OK"})

    def _named_versions(self, request: Request) -> list[Model]:
        """Return the version that a call names, or all versions."""
        name, version = _name_and_version(request)
        endpoint = self._models.endpoint(name)
        return list(endpoint.models) if version is None else [endpoint.version(version or None)]


class MethodRoute(Route):
    """A route with a handler per method. LMI's management API does not take HEAD, which Starlette adds to GET."""

    def __init__(self, path: str, handlers: Mapping[str, Handler]) -> None:
        async def call(request: Request) -> Response:
            return await handlers[request.method](request)

        super().__init__(path, call, methods=list(handlers))
        self.methods = set(handlers)
        self.handlers = handlers


class WholePathRoute(MethodRoute):
    """A MethodRoute that answers its path whatever the method is; 405 if it has none for it.

    Otherwise a route behind it may take the path for one of its own.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return (Match.NONE if match is Match.NONE else Match.FULL), child_scope


async def to_the_end(change: Awaitable[T]) -> T:
    """Await `change` in a task of its own, so that it is completed even if the client goes away meanwhile."""
    return await asyncio.shield(asyncio.ensure_future(change))


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Look at the error, if any, which the description of the model tells: asyncio would log it."""
    if not task.cancelled():
        task.exception()


def _name_and_version(request: Request) -> tuple[str, str | None]:
    """Return name and version that a call names; its query may have the version, "" for the model without one."""
    path = request.path_params
    return path["model"], path.get("version", request.query_params.get("model_version"))


# --- parameters ---


def model_source(given: Mapping[str, str]) -> ModelSource:
    url = given.get("url", "").strip()
    if not url and given.get("template"):
        raise BadParameterError(f"Parameter template: {NO_WORKFLOWS}; adapters go to /models/{{model}}/adapters")
    if not url:
        raise BadParameterError("Parameter url is required.")
    for name in ("model_name", "model_version"):
        if given.get(name):
            check_name(name, given[name])
    for name in ("min_worker", "max_worker"):
        _count(given, name)
    settings = {key: given[name] for name, key in _SETTINGS.items() if given.get(name) and not _is_default(name, given)}
    settings |= {name: value for name, value in given.items() if name.startswith("option.")}
    return ModelSource(url, given.get("model_name") or name_of(url), given.get("model_version") or None, settings)


def _is_default(name: str, given: Mapping[str, str]) -> bool:
    """Return whether a parameter of a registration leaves the key as it is configured."""
    text = given[name].strip()
    if name in ("engine", "device"):
        return text == _ALL_DEVICES
    return text in _DEFAULTS and (name, text) != ("min_worker", "0")  # no worker before the first request


def _count(given: Mapping[str, str], name: str) -> int | None:
    """Return a number of workers; None if it stays as it is."""
    value = integer(given, name, _UNCHANGED)
    if not _UNCHANGED <= value <= MAX_WORKERS:
        raise BadParameterError(
            f"Parameter {name} is {value}; it takes an integer from 0 to {MAX_WORKERS}, or -1 for no change"
        )
    return None if value == _UNCHANGED else value


def _device(given: Mapping[str, str]) -> int | None:
    """Return the first device of a device set, -1 for the CPU; None for all sets."""
    text = given.get("device", "").strip().lower()
    if not text or text == _ALL_DEVICES:
        return None
    digits = text.removeprefix("gpu")
    if text in ("cpu", "-1"):
        return -1
    if digits.isdecimal() and len(digits) <= _MAX_DIGITS:
        return int(digits)
    raise BadParameterError(f'Parameter device is "{excerpt(text)}"; it takes cpu, or a GPU as 0 or gpu0')


# --- descriptions ---


def _description(model: Model) -> dict[str, Any]:
    return {"workflowName": model.name, **_version(model), "models": [describe_model(model)]}


def _url(model: Model) -> str:
    """Return the URL of a model; for a path of the start the one that LMI shows, with a slash after a directory."""
    url = mask_url(model.source.url)
    if not model.at_startup or not url.startswith("/"):
        return url
    return f"file:{quote(url)}{'/' if archive_stem(url) is None else ''}"


def _address(source: ModelSource) -> str:
    """Return where a model is described, relative to the address of all models."""
    return "/".join(quote(part, safe="") for part in ("models", source.name, source.version) if part is not None)


def _version(model: Model) -> dict[str, str]:
    return {} if model.version is None else {"version": model.version}


def describe_model(model: Model) -> dict[str, Any]:
    """Return what the management API says of one version of a model."""
    failure = model.failure
    reason = {} if failure is None else {"reason": SECRETS.mask(failure.message)}
    return {
        "modelName": model.name,
        "modelUrl": _url(model),
        **_serving(model),
        "requestInQueue": 0 if model.pool is None else model.pool.dispatcher.queued,
        "status": model.status.value,
        **reason,
        **_loading(model),
        "loadedAtStartup": model.at_startup,
        **_environment(model),
        **_reload(model),
        **{name: note() for name, note in model.notes.items()},
        "workerGroups": []
        if model.pool is None
        else [_replicas(replicas, model.pool) for replicas in model.pool.replica_sets],
    }


def _loading(model: Model) -> dict[str, Any]:
    """Return how far a model, its next version or a worker of it is in loading; nothing if none loads."""
    load = model.loading
    if load is None:
        return {}
    progress = load.progress
    shown = {
        "what": excerpt(SECRETS.mask(progress.what), LONGEST_WORK),
        "startTime": _timestamp(load.began_at),
        "unit": progress.unit,
        "done": progress.done,
        "total": progress.total,
        "percent": progress.percent,
        "perSecond": None if progress.rate is None else round(progress.rate, 1),
        "secondsLeft": None if progress.left_s is None else round(progress.left_s, 1),
    }
    return {"loading": {name: value for name, value in shown.items() if value is not None}}


def _environment(model: Model) -> dict[str, Any]:
    """Return the environment of the model's own engine, with the versions of its packages; nothing without one."""
    found = None if model.pool is None else model.pool.settings.engine_environment
    return {} if found is None else {"environment": {"directory": found.directory, "packages": dict(found.packages)}}


def _reload(model: Model) -> dict[str, Any]:
    """Return how the last attempt to load the model again went; nothing if there was none."""
    reload = model.reload
    if reload is None:
        return {}
    reason = {} if reload.failure is None else {"reason": SECRETS.mask(reload.failure.message)}
    return {"reload": {"status": reload.status.value, "startTime": _timestamp(reload.began_at), **reason}}


def _serving(model: Model) -> dict[str, int]:
    """Return values of the configuration; nothing before it is read."""
    if model.resolved is None:
        return {}
    serving = model.resolved.serving
    return {
        "batchSize": serving.batch_size,
        "maxBatchDelayMillis": serving.max_batch_delay,
        "maxIdleSeconds": serving.max_idle_time,
        "queueSize": serving.job_queue_size,
    }


def _replicas(replicas: Replicas, pool: WorkerPool) -> dict[str, Any]:
    min_workers, max_workers = pool.scaling.bounds_of(replicas)
    return {
        "device": {"deviceType": replicas.devices.kind, "deviceId": replicas.devices.first},
        "minWorkers": min_workers,
        "maxWorkers": max_workers,
        "workers": [
            {
                "id": pool.roster.numbers[worker] + 1,
                "startTime": _timestamp(worker.ready_at),
                "status": "READY" if worker in pool.roster.ready else "UNLOADING",
                "pid": worker.pid,
                "requestsInFlight": worker.requests.running,
            }
            for worker in replicas.workers
        ],
    }


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
