"""`lmi-server route`: the front end, the queue and the dispatcher of this server in front of others."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from frontend.observability.server_log import formatter
from frontend.route.keys import RouteKeys
from lmi_server.client import numbers
from lmi_server.client.terminal import plain_configuration_errors
from lmi_server.configuration.server_settings import ServerSettings, find_config_file, resolve_server
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.dialects import routes
from lmi_server.dialects.optional import optional_dialects
from lmi_server.files.whole_files import write_text
from lmi_server.machine.environment import process_environment
from lmi_server.route.fleet import Fleet
from lmi_server.route.limits import Accounts
from lmi_server.route.pool import RouteSettings
from lmi_server.route.registry import RouteRegistry

if TYPE_CHECKING:
    from frontend.access.management_access import Access

logger = logging.getLogger(__name__)

_URLS = "Servers with OpenAI's API: http://HOST:PORT. Each address of a name is a server."
_KEYS = "TOML file of API keys and their limits; it is read again when it changes. Without it all requests are taken."
_BACKEND_KEY = "File with the API key that the servers ask for."
_FALLBACK = "MODEL=OTHER[,OTHER]: what serves the requests for a model while none of its servers can."
_MAX = "Requests of one model that a server has at a time; the others wait here, and keys take turns."
_QUEUE = "Requests of one model that may wait."
_TIMEOUT = "Seconds that a request may go without any part of its answer."
_CHECK = "Seconds between two checks of the servers, and two look-ups of their names."
_USAGE = "JSON file that keeps what the keys have spent, for the next start."
_DRAIN = "Seconds that requests have to finish at the end."
_PREDICTIONS = "/invocations"


def route(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help=_URLS)],
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, numbers.port("Port to listen on; 0 for any that is free.")] = None,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help=_KEYS)] = None,
    backend_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help=_BACKEND_KEY)] = None,
    fallback: Annotated[list[str] | None, typer.Option(metavar="MODEL=OTHER", help=_FALLBACK)] = None,
    max_concurrent: Annotated[int, numbers.count("--max-concurrent", _MAX)] = 256,
    queue_size: Annotated[int, numbers.count("--queue-size", _QUEUE)] = 1000,
    timeout: Annotated[float, numbers.seconds("--timeout", _TIMEOUT, 1)] = 600.0,
    check_interval: Annotated[float, numbers.seconds("--check-interval", _CHECK, 0.1)] = 2.0,
    usage_file: Annotated[Path | None, typer.Option(metavar="FILE", help=_USAGE)] = None,
    drain_timeout: Annotated[float | None, numbers.delay("--drain-timeout", _DRAIN)] = None,
    config_file: Annotated[Path | None, typer.Option("--config-file", "-f", help="Settings of the front end.")] = None,
    log_level: Annotated[str | None, typer.Option(help="Level of the log.")] = None,
) -> None:
    """Spread requests over other servers with OpenAI's API, such as this one, vLLM, SGLang and TGI."""
    # Imported late, here and below: other commands need neither the front end nor uvicorn.
    from frontend.server import run

    environment = process_environment()
    flags = {"host": host, "port": port, "drain_timeout": drain_timeout, "log_level": log_level, "model_store": None}
    with plain_configuration_errors():
        settings, warnings = resolve_server(
            environment, flags, config_file or find_config_file(environment, Path.cwd())
        )
        route_settings = RouteSettings(
            paths=_paths(),
            max_in_flight=max_concurrent,
            queue_size=queue_size,
            timeout_s=timeout,
            fallbacks=_fallbacks(fallback or ()),
        )
        fleet = Fleet(urls, _backend_key(backend_key_file), check_interval)
        accounts = Accounts()
        ring = None if keys is None else _key_ring(keys, accounts, settings)
        save = _Usage(usage_file, accounts).save
    if ring is not None and settings.management_clients is None:
        settings = settings.model_copy(update={"management_clients": "none"})
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings.log_format))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for warning in warnings:
        logger.warning(warning)
    registry = functools.partial(RouteRegistry, route_settings, fleet, accounts, save)
    code = run([], settings, environment, registry=registry, access=_access(ring))
    save()
    raise typer.Exit(code)


def _access(ring: RouteKeys | None) -> Callable[[ServerSettings, Mapping[str, str]], Access]:
    """Return what makes the access of the server, with the keys of `ring`."""
    from frontend.access.management_access import Access

    if ring is None:
        return Access.from_settings
    return lambda settings, environment: replace(Access.from_settings(settings, environment), keys=ring, pages=None)


def _key_ring(file: str, accounts: Accounts, settings: ServerSettings) -> RouteKeys:
    if settings.api_keys is not None or settings.api_keys_file is not None:
        raise ConfigurationError("--keys and api_keys are both set; write all keys into the file of --keys")
    return RouteKeys(file, accounts)


def _paths() -> Mapping[str, str]:
    """Return the path of each route, the first one if it has several."""
    from frontend.app import INFERENCE_PATHS

    found: dict[str, str] = {}
    for path, name in {**INFERENCE_PATHS, **optional_dialects().paths}.items():
        found.setdefault(name, path)
    return {**found, routes.PREDICTIONS: _PREDICTIONS}


def _backend_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f'--backend-key-file "{file}" cannot be read: {error}') from error
    if not key or not key.isprintable():
        raise ConfigurationError(f'--backend-key-file "{file}" has no key in it; write it as one line')
    SECRETS.add(key)
    return key


def _fallbacks(given: Sequence[str]) -> Mapping[str, Sequence[str]]:
    found: dict[str, Sequence[str]] = {}
    for text in given:
        name, separator, others = text.partition("=")
        names = [other for other in others.split(",") if other]
        if not separator or not name or not names or name in names or name in found:
            raise ConfigurationError(f'--fallback "{text}" is not allowed; write MODEL=OTHER, once for each model')
        found[name] = names
    return found


class _Usage:
    """What the keys have spent, in a file."""

    def __init__(self, file: Path | None, accounts: Accounts) -> None:
        """Raises ConfigurationError if there is a file that cannot be read."""
        self._file = file
        self._accounts = accounts
        self._saved = ""
        if file is not None and file.exists():
            try:
                spent: Any = json.loads(file.read_text(encoding="utf-8"))
                accounts.restore(spent)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigurationError(
                    f'--usage-file "{file}" cannot be read: {error}; remove it to begin at zero'
                ) from error

    def save(self) -> None:
        """Write the file, if anything was spent since it was written."""
        if self._file is None:
            return
        text = json.dumps(self._accounts.usage_by_key())
        if text == self._saved:
            return
        try:
            write_text(self._file, text)
        except ConfigurationError as error:
            logger.error("--usage-file %s cannot be written: %s", self._file, error)
        else:
            self._saved = text
