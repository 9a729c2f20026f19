"""The health check of the container images: `python -m lmi_server.commands.health_check` ends with 0 if /ping answers.

It asks the address of the settings, by TLS or at a Unix socket if they say so. `serve` reads the same settings.
"""

from __future__ import annotations

import socket
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from lmi_server.configuration.server_settings import UNIX, ServerSettings, find_config_file, resolve_server
from lmi_server.contract.errors import ConfigurationError
from lmi_server.machine.environment import process_environment

_LIMIT_S = 4.0
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # nosec B104 - not an address to listen on


class _UnixConnection(HTTPConnection):
    """A connection to a Unix socket, whose path is the host."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


def main() -> int:
    """Return the exit code: 0 if the server answers /ping with a success, otherwise 1."""
    environment = process_environment()
    try:
        settings, _ = resolve_server(environment, {}, find_config_file(environment, Path.cwd()))
        status = _ping(_connection(settings))
    except (ConfigurationError, OSError, HTTPException) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"/ping: {status}\n")
    return 0 if 200 <= status < 300 else 1


def _connection(settings: ServerSettings) -> HTTPConnection:
    if settings.host.startswith(UNIX):
        connection: HTTPConnection = _UnixConnection("localhost", timeout=_LIMIT_S)
        connection.host = settings.host.removeprefix(UNIX)
        return connection
    host = _OWN.get(settings.host, settings.host)
    if settings.tls:
        # The certificate names the server as clients call it, not as this process does.
        context = ssl._create_unverified_context()  # nosec B323
        return HTTPSConnection(host, settings.port, timeout=_LIMIT_S, context=context)
    return HTTPConnection(host, settings.port, timeout=_LIMIT_S)


def _ping(connection: HTTPConnection) -> int:
    try:
        connection.request("GET", "/ping", headers={"Host": "localhost"})
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
