"""The servers of a router, for people and scripts: /route/servers on the address of the management API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.management_access import ManagementGuard
from frontend.features import ServerFeature, ServerParts
from frontend.http.responses import json_response
from lmi_server.route.fleet import Server
from lmi_server.route.registry import RouteRegistry


def attach(server: ServerParts) -> ServerFeature | None:
    """Return the feature; None if the server is no router."""
    if not isinstance(server.models, RouteRegistry):
        return None
    return ServerList(server.models, server.access.guard)


class ServerList(ServerFeature):
    """Answers /route/servers."""

    def __init__(self, models: RouteRegistry, guard: ManagementGuard) -> None:
        self._models = models
        self._guard = guard

    def management_routes(self) -> list[Route]:
        return [Route("/route/servers", self.servers)]

    async def servers(self, request: Request) -> Response:
        """Return each server: whether it gets requests, why not, its models, and how many requests it has."""
        self._guard.check(request.scope)
        return json_response({"servers": [self._describe(server) for server in self._models.fleet.servers.values()]})

    def _describe(self, server: Server) -> dict[str, Any]:
        described = {
            "server": server.label,
            "url": server.site.url,
            "healthy": server.is_healthy,
            "models": {name: sorted(adapters) for name, adapters in server.models.items()},
            "requests": self._models.requests_at(server),
        }
        return described if server.is_healthy else {**described, "reason": server.reason}
