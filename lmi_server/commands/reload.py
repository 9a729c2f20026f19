"""`lmi-server reload`: has a running server load a model again, with its configuration as it is now."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from lmi_server.client.server_calls import DEFAULT_URL, Headers, ServerCalls, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError

ModelName = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Name of the model, or name:version; it may be left out if it is one."),
]
Url = Annotated[str, typer.Option(help="The server.")]
_LIST_S = 30.0


def reload_model(
    model: ModelName = None,
    url: Url = DEFAULT_URL,
    header: Headers = None,
) -> None:
    """Load a model of a running server again, with its files as they are now, and switch without losing a request.

    The model serves on while it is loaded beside itself. If that fails, it serves on as before, and the exit code is 1.
    """
    with plain_configuration_errors():
        server = ServerCalls(url, dict(parse_headers(header or ())))
        name = model or only_model(server)
        path = "/".join(quote(part, safe="") for part in name.split(":", 1))
        began = time.monotonic()
        server.json("POST", f"/models/{path}/reload", None)
    typer.echo(f"{name}: loaded again in {time.monotonic() - began:.1f} s")


def only_model(server: ServerCalls) -> str:
    """Return the name of the one model. Raises ConfigurationError if there is another number of them."""
    rows = server.json("GET", "/models", _LIST_S)["models"]
    labels = [":".join(filter(None, (row["modelName"], row.get("version")))) for row in rows]
    if len(labels) != 1:
        found = f"has several models, name one: {', '.join(labels)}" if labels else "has no model"
        raise ConfigurationError(f"{server.url} {found}")
    return labels[0]
