"""Who may manage models.

Registering a model means running its code. So the management API must answer neither other machines unasked, nor a web
page that the user of this machine happens to have open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from frontend.access.api_keys import KeyRing, key_ring
from frontend.access.registration_limits import RegistrationLimits
from frontend.access.web_pages import WebPages, pages_of_management, pages_of_requests
from frontend.http.clients import Receive, Scope, Send, is_local, remote_sign
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import PermissionDeniedError
from lmi_server.machine.environment import is_multi_model

_Application = Callable[[Any, Any, Any], Awaitable[None]]

_MANAGERS = {
    "any": "all clients (management_clients=any)",
    "local": "clients on this machine",
    "none": "no client, because api_keys is set; set management_api_keys, or management_clients=local",
}


class ManagementGuard:
    """Refuses calls of the management API.

    SageMaker's multi-model endpoints call it from another machine in a network of their own, so nothing is refused
    there.
    """

    def __init__(self, settings: ServerSettings, environment: Mapping[str, str]) -> None:
        self.keys = key_ring("management_api_keys", settings.management_api_keys, settings.management_api_keys_file)
        self._off = is_multi_model(environment)
        self._clients = settings.management_clients or _clients_by_default(settings)
        self._is_by_default = settings.management_clients is None
        self._pages = pages_of_management(settings)

    @property
    def managers(self) -> str:
        """Return in words who may manage models, for the log."""
        if self.keys is not None:
            return "clients with a key of management_api_keys"
        if self._off:
            return "all clients (SAGEMAKER_MULTI_MODEL=true)"
        return _MANAGERS[self._clients]

    @property
    def guesses_clients(self) -> bool:
        """Return whether it is by default, and by the look of its connection alone, that a client is taken as local."""
        return self.keys is None and not self._off and self._is_by_default and self._clients == "local"

    def check_reader(self, scope: Scope) -> None:
        """Raise AuthenticationError if this client may not read metrics: without keys everybody may."""
        if self.keys is not None:
            self.keys.check(scope)

    def check(self, scope: Scope) -> None:
        """Raise AuthenticationError or PermissionDeniedError if this client may not manage models.

        A key is enough, wherever the client is: no web page can make a browser send it.
        """
        if self.keys is not None:
            self.keys.check(scope)
            return
        if self._off:
            return
        self._check_client(scope)
        self._pages.check_scope(scope)

    def check_page(self, scope: Scope) -> None:
        """Raise PermissionDeniedError if this client may not load the console's page.

        The page holds nothing secret: if there are keys, it asks for one, and every call that it makes is checked.
        """
        if self.keys is None and not self._off:
            self._check_client(scope)

    def _check_client(self, scope: Scope) -> None:
        if self._clients == "none":
            raise PermissionDeniedError(
                "api_keys is set, and no client may manage models: management_api_keys lets clients with a key do it, "
                "and management_clients=local lets those on the machine of the server"
            )
        if self._clients == "local" and not is_local(scope):
            raise PermissionDeniedError(
                f"Models are managed from the machine of the server alone, and {remote_sign(scope)}; "
                "management_api_keys lets clients with a key do it, and management_clients=any lets all"
            )


def _clients_by_default(settings: ServerSettings) -> str:
    """Return which clients may manage models if no setting says so.

    A server with keys for requests often stands behind a proxy on its machine, through which every client looks local.
    """
    return "local" if settings.api_keys is None and settings.api_keys_file is None else "none"


@dataclass(frozen=True, slots=True)
class Access:
    """What limits requests and the management API.

    `keys` is None if requests need none. `pages` is None if they need one, which no page can make a browser send, and
    if others than this machine reach the server.
    """

    keys: KeyRing | None
    pages: WebPages | None
    guard: ManagementGuard
    limits: RegistrationLimits

    @property
    def key_rings(self) -> list[KeyRing]:
        return [ring for ring in (self.keys, self.guard.keys) if ring is not None]

    @classmethod
    def from_settings(cls, settings: ServerSettings, environment: Mapping[str, str]) -> Access:
        """Return what the settings ask for. Raises ConfigurationError if keys cannot be read."""
        keys = key_ring("api_keys", settings.api_keys, settings.api_keys_file)
        pages = pages_of_requests(settings) if keys is None else None
        return cls(keys, pages, ManagementGuard(settings, environment), RegistrationLimits(settings, environment))


def protect(routes: list[Route], check: Callable[[Scope], object]) -> list[Route]:
    """Return the routes, now with the refusals of `check`."""
    for route in routes:
        route.app = _check_calls(route.app, check)
    return routes


def _check_calls(application: _Application, check: Callable[[Scope], object]) -> _Application:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        check(scope)
        await application(scope, receive, send)

    return call
