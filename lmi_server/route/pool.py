"""The pool of one model whose workers are servers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec

from lmi_server.contract.errors import BadParameterError, RouteNotFoundError
from lmi_server.contract.metrics import MetricSink
from lmi_server.contract.protocol import Adapter, Frame, Input, Load
from lmi_server.dialects.forms import form_fields
from lmi_server.machine.devices import DeviceSet
from lmi_server.route.backend import Backend
from lmi_server.route.fleet import Fleet, Server
from lmi_server.route.limits import Accounts
from lmi_server.serving.adapters.adapters import Adapters, RegisteredAdapter
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import PoolSettings
from lmi_server.serving.roster import WorkerRoster
from lmi_server.supervisor.replicas import LoadPlan, Replicas
from lmi_server.supervisor.worker_process import WorkerProcess

_ADAPTERS_AT_HAND = 8
_UNREADABLE = (
    "This API key may use some models only, and what the body names cannot be told; send a JSON object, or a form whose"
    ' field "model" names the model'
)
_GRACE_S = 10.0  # for a server to come back, before the requests that wait are refused


class RouteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are passed on: `paths` has the path of each route; times are in seconds.

    `fallbacks` has the models that serve the requests for a model while no server of its own can, in order.
    """

    paths: Mapping[str, str]
    max_in_flight: int
    queue_size: int
    timeout_s: float
    fallbacks: Mapping[str, Sequence[str]] = {}


class _Named(msgspec.Struct):
    """The name of the model in a body."""

    model: msgspec.Raw = msgspec.Raw(b"null")


_named = msgspec.json.Decoder(_Named).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode


class ListedAdapters(Adapters):
    """The adapters that the servers of a model list. They are not managed here."""

    def __init__(self) -> None:
        super().__init__((), lambda: (), 0.0)

    def follow(self, names: Collection[str]) -> None:
        """Have these adapters."""
        for name in [name for name in self._adapters if name not in names]:
            del self._adapters[name], self._since[name]
        for name in names:
            if name not in self._adapters:
                adapter = Adapter(name=name, directory="")
                self._adapters[name] = RegisteredAdapter(adapter=adapter, source=name)
                self._since[name] = time.time()

    async def register(self, registered: RegisteredAdapter) -> str:
        raise BadParameterError("The adapters of a router are those of its servers; register it there")

    update = register

    async def remove(self, name: str) -> str:
        raise BadParameterError("The adapters of a router are those of its servers; unregister it there")


class Backends(Replicas):
    """The servers of one model, in the place of a replica set. `without_since` is when the last of them was lost."""

    def __init__(self, roster: WorkerRoster) -> None:
        super().__init__(DeviceSet())
        self.without_since = time.monotonic()
        self._roster = roster

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        return self._roster.serving

    @property
    def ready(self) -> int:
        return len(self._roster.ready)

    @property
    def is_failing(self) -> bool:
        return not self.ready and time.monotonic() - self.without_since >= _GRACE_S


class RoutePool(WorkerPool):
    """Passes the requests for one model on to the servers that have it."""

    def __init__(
        self, name: str, settings: RouteSettings, fleet: Fleet, accounts: Accounts, on_metric: MetricSink
    ) -> None:
        self._route = settings
        self._fleet = fleet
        self._accounts = accounts
        self._backends: dict[Server, Backend] = {}
        self._listed = ListedAdapters()
        super().__init__(_pool_settings(name, settings), on_metric, self._listed)

    def _make_replica_sets(self, plan: LoadPlan) -> Sequence[Replicas]:
        self._set = Backends(self.roster)
        return [self._set]

    @property
    def takes_requests(self) -> bool:
        """Return whether a request would be served, or wait for a server that is there."""
        if self.availability.closing is not None or not self.roster.ready:
            return False
        return self.dispatcher.queued < self.settings.job_queue_size

    def _prepare(self, request: Input, tenant: bytes) -> Input:
        """Return the request with its priority and the name of its model, within the limits of its key."""
        if request.route not in self._route.paths:
            raise RouteNotFoundError(f"A router does not pass on requests of the kind {request.route}")
        asked = _model_in(request)
        is_limited = self._accounts.limits_models(tenant)
        is_own = asked is None or asked == self.name or asked in self._listed
        fields = _fields_in(request) if is_limited or not is_own else None
        if is_limited and fields is None:
            asked = self._model_in_form(request)
        priority = self._accounts.admit(tenant, self._names_for(asked), time.monotonic(), _today())
        if priority is not None and priority > request.priority:
            request = msgspec.structs.replace(request, priority=priority)
        if fields is None:
            return request
        return _rename(request, fields, asked if asked is not None and asked in self._listed else self.name)

    def _names_for(self, asked: str | None) -> Sequence[str]:
        """Return the names of this model that permit its use: a key must allow one of them.

        What a body names counts if it is an adapter, or a model that this one serves for. Path, query and headers may
        have chosen another model than the body names.
        """
        if asked is not None and (asked in self._listed or self.name in self._route.fallbacks.get(asked, ())):
            return asked, self.name
        return (self.name,)

    def _model_in_form(self, request: Input) -> str:
        """Return this model, or its adapter, as a form names it.

        Raises BadParameterError for any other body: what cannot be read here may name another model to the server.
        """
        fields = form_fields(request.properties.get("content-type", ""), request.body(), ("model",)) or ()
        names = {value.decode("utf-8", "replace") for _, value in fields}
        name = names.pop() if len(names) == 1 else None
        if name is None or (name != self.name and name not in self._listed):
            raise BadParameterError(_UNREADABLE)
        return name

    def follow(self, servers: Mapping[Server, Collection[str]]) -> None:
        """Give requests to these servers, each with the adapters that it has, and to no others from now on."""
        common = [frozenset(adapters) for adapters in servers.values()]
        if common:
            self._listed.follow(frozenset.intersection(*common))
        for server in self._backends.keys() - servers.keys():
            self._leave(server)
        for server in servers.keys() - self._backends.keys():
            self._admit(server)
        for worker in [worker for worker in self.roster.leaving if not worker.requests.in_flight]:
            self.roster.drop(worker)
            self.roster.remove(worker)
        self.members.fail_stranded()

    def requests_at(self, server: Server) -> int:
        """Return how many requests a server that takes more has."""
        backend = self._backends.get(server)
        return 0 if backend is None else len(backend.requests.in_flight)

    def _admit(self, server: Server) -> None:
        backend = Backend(
            f"{self.name}@{server.label}",
            server.site,
            server.connections,
            self._route.paths,
            self._on_items,
            lambda reason: self._fleet.note_unreachable(server, reason),
            lambda tenant, tokens: self._accounts.count(tenant, tokens, time.monotonic(), _today()),
        )
        worker = cast(WorkerProcess, backend)
        self._backends[server] = backend
        self.roster.numbers[worker] = self.roster.free_number()
        self.roster.ready.append(worker)
        self.availability.was_ready = True
        self.availability.settled.set()
        self.dispatcher.resume()
        self.scaling.notify()

    def _leave(self, server: Server) -> None:
        worker = cast(WorkerProcess, self._backends.pop(server))
        self.members.leave(worker)
        if not self.roster.ready:
            self._set.without_since = time.monotonic()

    def _on_items(self, backend: Backend, items: list[Frame]) -> None:
        self.dispatcher.on_items(cast(WorkerProcess, backend), items)

    async def scale(self, min_workers: int | None, max_workers: int | None, device: int | None = None) -> None:
        raise BadParameterError(f"Model {self.name} is served elsewhere; scale it there")


def _pool_settings(name: str, settings: RouteSettings) -> PoolSettings:
    return PoolSettings(
        load=Load(model_name=name, model_dir="", handler="", options={}, served_names=[name]),
        min_workers=1,
        max_workers=1,
        max_in_flight=settings.max_in_flight,
        max_batch_delay_s=0.0,
        job_queue_size=settings.queue_size,
        max_queue_delay_s=None,
        model_loading_timeout_s=settings.timeout_s,
        predict_timeout_s=settings.timeout_s,
        max_idle_s=settings.timeout_s,
        parallel_loading=True,
        retry_threshold=1,
        quarantine_s=0.0,  # a server that ends accuses no request
        sessions=True,
        prefix_affinity=True,
        adapter_affinity=_ADAPTERS_AT_HAND,
    )


def _model_in(request: Input) -> str | None:
    """Return what a body names as model; None if it is no JSON, or names none."""
    try:
        return _text(_named(request.body()).model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _fields_in(request: Input) -> Mapping[str, msgspec.Raw] | None:
    """Return the fields of a body; None if it is no JSON object."""
    try:
        return _fields(request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _rename(request: Input, fields: Mapping[str, msgspec.Raw], name: str) -> Input:
    """Return the request with these fields and this name of its model, once; other values stay as they were written.

    A body may name two models, and a server may read either.
    """
    body = msgspec.json.encode({**fields, "model": name})
    query = [pair for pair in request.content if pair[0] != "data"]
    return msgspec.structs.replace(request, content=[*query, ("data", body)])


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
