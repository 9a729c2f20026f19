"""Refuses what web pages of other sites have the browser of a user of this machine or its network send.

A page can send a POST without asking first (no preflight), but its browser adds Origin or Sec-Fetch-Site, which no page
can set. A page that reaches the server by a name of its own (DNS rebinding) has this name in Host.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from frontend.http.clients import Scope
from lmi_server.configuration.server_settings import UNIX, ServerSettings
from lmi_server.contract.errors import PermissionDeniedError
from lmi_server.contract.texts.quoting import excerpt

ANY = "*"
_OTHER_SITES = ("cross-site", "same-site")
_REMEMBERED = 64  # values of Host


class WebPages:
    """Which pages may call the server: its own, and those of `origin`."""

    def __init__(self, settings: ServerSettings, origin: str | None) -> None:
        self._hosts = {name.lower() for name in (*settings.allowed_hosts, socket.gethostname())}
        self._hosts |= {name.lower() for name in (settings.host, settings.management_host) if name}
        self._origin = origin
        self._is_own_host = functools.lru_cache(_REMEMBERED)(self._owns)

    def check(self, host: str, origin: str | None, site: str | None) -> None:
        """Raise PermissionDeniedError for a page of another site; the arguments are Host, Origin and Sec-Fetch-Site."""
        if not self._is_own_host(host):
            raise PermissionDeniedError(
                f"Header Host is {excerpt(host)}, which is no name of this server; allowed_hosts names further ones"
            )
        if origin is not None:
            self._check_origin(host, origin, site)
        elif site in _OTHER_SITES and self._origin != ANY:
            raise PermissionDeniedError("Web pages of other sites may not use this server")

    def check_scope(self, scope: Scope) -> None:
        """As `check`, for a request as ASGI has it."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        self.check(headers.get(b"host", ""), headers.get(b"origin"), headers.get(b"sec-fetch-site"))

    def _check_origin(self, host: str, origin: str, site: str | None) -> None:
        # A proxy may put another name into Host; the browser says then that the page is of the same site.
        is_own = site == "same-origin" or _split(origin).netloc.lower() == host.lower() != ""
        if not is_own and self._origin not in (ANY, origin):
            raise PermissionDeniedError(
                f"Header Origin is {excerpt(origin)}; web pages of other sites may not use this server, "
                "unless cors_allowed_origin names theirs"
            )

    def _owns(self, host: str) -> bool:
        """Return whether a browser could not have been led here by this name: a name without a dot has no owner."""
        if not host or ANY in self._hosts:
            return True
        name = _split(f"//{host}").hostname
        if not name:
            return False
        return _is_address(name) or "." not in name or name.endswith(".localhost") or name in self._hosts


def pages_of_requests(settings: ServerSettings) -> WebPages | None:
    """Return the check for requests; None if others than this machine reach the server.

    Then all clients may send requests, and a gateway may pass on requests of its own pages.
    """
    return WebPages(settings, settings.cors_allowed_origin) if is_loopback(settings.host) else None


def pages_of_management(settings: ServerSettings) -> WebPages:
    """Return the check for the management API, which is never open to all pages."""
    origin = settings.cors_allowed_origin
    return WebPages(settings, None if origin == ANY else origin)


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached by TCP from this machine alone; a Unix socket is not."""
    if host.startswith(UNIX):  # no browser speaks to it
        return False
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; none if it is not one."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
