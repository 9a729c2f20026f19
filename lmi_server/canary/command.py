"""`lmi-server reload` with a share of the requests first (`--canary`), or with copies of them (`--shadow`)."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from lmi_server.client.numbers import NumberFlag, count, factor, fraction, number_option, seconds
from lmi_server.client.server_calls import DEFAULT_URL, Headers, ServerCalls, parse_headers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.commands import reload as plain
from lmi_server.commands.reload import ModelName, Url
from lmi_server.contract.errors import ConfigurationError


def reload_model(
    model: ModelName = None,
    url: Url = DEFAULT_URL,
    header: Headers = None,
    canary: Annotated[
        str | None, typer.Option(help="Share of the requests that the new version gets at first, such as 5%.")
    ] = None,
    shadow: Annotated[
        bool, typer.Option(help="Copies of requests go to the new version; clients get the answers of the old one.")
    ] = False,
    requests: Annotated[int | None, count("--requests", "Requests after which the new version is judged.")] = None,
    duration: Annotated[float | None, seconds("--duration", "Seconds within which so many must have come.")] = None,
    max_errors: Annotated[
        float | None, fraction("--max-errors", "Percent points by which the share of errors may be higher.", 100)
    ] = None,
    max_slower: Annotated[
        float | None, factor("--max-slower", "Times as slow as before that the new version may be.")
    ] = None,
    max_changed: Annotated[
        float | None, fraction("--max-changed", "With --shadow: percent of the answers that may be others.", 100)
    ] = None,
    max_shift: Annotated[
        float | None,
        number_option(
            NumberFlag("--max-shift", 0), "With --shadow: nats by which log-probabilities may differ in the mean."
        ),
    ] = None,
    max_client: Annotated[
        float | None,
        fraction("--max-client", "Percent of those requests that one session or sticking API key may send.", 100),
    ] = None,
    promote: Annotated[bool, typer.Option(help="Let the version that is being tried take the place now.")] = False,
    take_back: Annotated[bool, typer.Option(help="End the version that is being tried.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait for the outcome.")] = True,
) -> None:
    """Load a model of a running server again, with its files as they are now, and switch without losing a request.

    The model serves on while it is loaded beside itself. If that fails, it serves on as before, and the exit code is 1.
    With --canary or --shadow the new version must first be as good as the old one.
    """
    rules = {
        "requests": requests,
        "duration": duration,
        "max_errors": max_errors,
        "max_slower": max_slower,
        "max_changed": max_changed,
        "max_shift": max_shift,
        "max_client": max_client,
    }
    given = {name: str(value) for name, value in rules.items() if value is not None}
    tries = canary is not None or shadow
    with plain_configuration_errors():
        for unused in () if tries else (*given, *(() if wait else ("no-wait",))):
            raise ConfigurationError(f"--{unused.replace('_', '-')} needs --canary or --shadow")
        asked = [name for name, is_asked in (("", tries), ("promote", promote), ("take_back", take_back)) if is_asked]
        if not asked:
            plain.reload_model(model, url, header)
            return
        if len(asked) > 1:
            raise ConfigurationError("--canary, --shadow, --promote and --take-back exclude each other: give one")
        server = ServerCalls(url, dict(parse_headers(header or ())))
        name = model or plain.only_model(server)
        if tries:
            given |= {"shadow": str(shadow).lower(), "synchronous": str(wait).lower()}
            outcome = _try(server, name, wait, given | ({} if canary is None else {"share": canary}))
        else:
            _call(server, name, f"/{asked[0]}", {})
            outcome = "promoted" if promote else "taken back"
    typer.echo(f"{name}: {outcome}")


def _try(server: ServerCalls, name: str, wait: bool, parameters: dict[str, str]) -> str:
    """Have the new version tried; return what became of that, or that it has begun."""
    if wait:
        message = "waiting for the outcome; GET %s says how the trial goes, and --take-back ends it"
        typer.echo(f"{name}: {message % plain.split_model_name(name)[0]}", err=True)
    return str(_call(server, name, "", parameters)["status"])


def _call(server: ServerCalls, name: str, action: str, parameters: dict[str, str]) -> Any:
    path, version = plain.split_model_name(name)
    return server.json("POST", f"{path}/canary{action}?{urlencode(parameters | version)}", None)
