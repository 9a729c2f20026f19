"""`lmi-server reload`: has a running server load a model again, with its configuration as it is now."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from lmi_server.client.server_calls import DEFAULT_URL, Headers, ServerCalls, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.contract.errors import ConfigurationError

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Name of the model, or name:version, or name: for the one without a version beside others; it may be left "
        "out if there is one model.",
    ),
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
        path, version = split_model_name(name)
        began = time.monotonic()
        server.json("POST", f"{path}/reload?{urlencode(version)}", None)
    typer.echo(f"{name}: loaded again in {time.monotonic() - began:.1f} s")


def split_model_name(model: str) -> tuple[str, dict[str, str]]:
    """Return the path of what an argument names, and the parameter that names its version, if it does."""
    name, separator, version = model.partition(":")
    return f"/models/{quote(name, safe='')}", {"model_version": version} if separator else {}


def only_model(server: ServerCalls) -> str:
    """Return the name of the one model. Raises ConfigurationError if there is another number of them."""
    rows = server.json("GET", "/models", _LIST_S)["models"]
    labels = [":".join(filter(None, (row["modelName"], row.get("version")))) for row in rows]
    if len(labels) != 1:
        found = f"has several models, name one: {', '.join(labels)}" if labels else "has no model"
        raise ConfigurationError(f"{server.url} {found}")
    return labels[0]
