"""The models of all servers behind a router. They come and go with the servers; none is registered here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lmi_server.contract.errors import ModelExistsError, ModelNotReadyError
from lmi_server.route.fleet import Fleet, Server
from lmi_server.route.limits import Accounts
from lmi_server.route.pool import RoutePool, RouteSettings
from lmi_server.serving.models.followed import FollowedModels
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus

logger = logging.getLogger(__name__)

_MAX_MODELS = 2000


class RoutedModel(Model):
    """A model that servers have. While none of them takes requests, its fall-back models serve it."""

    def __init__(self, name: str, fallbacks: Callable[[], Sequence[Model]]) -> None:
        super().__init__(ModelSource(name, name), at_startup=True)
        self._fallbacks = fallbacks

    def loaded(self) -> WorkerPool:
        """Return the pool that takes a request now. Raises ModelNotReadyError if there is none."""
        for model in (self, *self._fallbacks()):
            if isinstance(model.pool, RoutePool) and model.pool.takes_requests:
                return model.pool
        return super().loaded()


class RouteRegistry(FollowedModels):
    """Has a pool for each model that a server lists. `on_round` is called after each round of checks."""

    untold = "The router starts, and does not know the models of its servers yet"
    elsewhere = "The models of a router are those of its servers; register and unregister them there"

    def __init__(
        self, settings: RouteSettings, fleet: Fleet, accounts: Accounts, on_round: Callable[[], None], *server: Any
    ) -> None:
        super().__init__(*server)
        self.fleet = fleet
        self._route = settings
        self._accounts = accounts
        self._on_round = on_round
        self._left_out = 0  # models in the last round
        self._has_heard = False  # from any server which models it has
        fleet.on_checked = self.update

    async def follow(self) -> None:
        for name in self._route.fallbacks:
            self._serve(name)
        await self.fleet.run()

    def refuse_if_untold(self) -> None:
        super().refuse_if_untold()
        if not self._has_heard:
            raise ModelNotReadyError("No server has said yet which models it has; GET /route/servers says why")

    @property
    def startup_statuses(self) -> set[ModelStatus]:
        """Return HEALTHY if any model can be served: a balancer in front of the router need know no more."""
        if ModelStatus.HEALTHY in super().startup_statuses:
            return {ModelStatus.HEALTHY}
        return {ModelStatus.UNHEALTHY if self._told.is_set() else ModelStatus.PENDING}

    def update(self) -> None:
        """Have the models and the servers that there are now."""
        if self._draining:
            return
        found: dict[str, dict[Server, Collection[str]]] = {}
        self._has_heard = self._has_heard or bool(self.fleet.healthy)
        for server in self.fleet.healthy:
            for name, adapters in server.models.items():
                found.setdefault(name, {})[server] = adapters
        self._tell_apart(found)
        self._serve_new([name for name in found if name not in self._endpoints])
        for model in self.models:
            if isinstance(model.pool, RoutePool):
                model.pool.follow(found.get(model.name, {}))
        self._told.set()
        self._on_round()

    def _choose_default(self) -> None:
        """Have no model that gets the requests for every name: another server may have the one that is meant."""
        super()._choose_default()
        self.only = None

    @staticmethod
    def _tell_apart(found: dict[str, dict[Server, Collection[str]]]) -> None:
        """Have an adapter that not all servers of its model have as a model of its own."""
        for servers in list(found.values()):
            common = frozenset.intersection(*map(frozenset, servers.values()))
            for server, adapters in servers.items():
                for name in adapters:
                    if name not in common:
                        found.setdefault(name, {})[server] = frozenset()

    def _serve_new(self, names: Sequence[str]) -> None:
        """Serve models that servers list, up to a number of all; say it once for each number that is left out."""
        room = max(0, _MAX_MODELS - len(self._endpoints))
        for name in names[:room]:
            self._serve(name)
        left_out = names[room:]
        if left_out and len(left_out) != self._left_out:
            message = "the servers have more than %d models; %d are left out, such as %s"
            logger.error(message, _MAX_MODELS, len(left_out), left_out[0])
        self._left_out = len(left_out)

    def _serve(self, name: str) -> None:
        fallbacks = self._route.fallbacks.get(name, ())
        model = RoutedModel(
            name, lambda: [self._endpoints[other].models[0] for other in fallbacks if other in self._endpoints]
        )
        try:
            self._add(model)
        except ModelExistsError:
            return
        model.pool = RoutePool(name, self._route, self.fleet, self._accounts, self._on_metric)
        model.pool.start()
        model.settled.set()

    def requests_at(self, server: Server) -> int:
        """Return how many requests a server has."""
        return sum(model.pool.requests_at(server) for model in self.models if isinstance(model.pool, RoutePool))
