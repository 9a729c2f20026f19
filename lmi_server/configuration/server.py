"""Settings of the server itself, not of a model: command line, `SERVING_*`, config.properties, defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration import environment as env
from lmi_server.configuration.check import build
from lmi_server.configuration.declaration import Allowed, Key, Option, Options
from lmi_server.configuration.layers import (
    Given,
    from_file,
    from_values,
    from_variables,
    merge,
    sort_keys,
    spellings,
    unknown_key_warning,
)
from lmi_server.configuration.options import PositiveInt
from lmi_server.configuration.properties import read_properties
from lmi_server.errors import ConfigurationError

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


class ServerSettings(Options):
    """Settings of the front end. Where LMI has a global key for one, it has that name."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every interface.")
    port: Annotated[int, Field(ge=0, le=65535), Allowed("an integer from 0 to 65535")] = Field(
        8080, description="Port to listen on; 0 lets the system choose one."
    )
    max_request_size: PositiveInt = Field(67108864, description="Longest request body in bytes.")
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number of seconds, 0 or more")] = (
        Field(30.0, description="Seconds that running requests get to finish after SIGTERM.")
    )
    request_id_header: Annotated[str, Field(min_length=1), Key("request_id_header_key")] = Field(
        "x-request-id", description="Header that carries the id of a request."
    )
    model_store: str | None = Field(None, description="Directory that holds models, each a directory or an archive.")
    load_models: Annotated[str, Field(min_length=1)] = Field(
        "ALL",
        description="Models to load at the start: ALL of the model store, NONE, or name:version:engine:devices=url.",
    )
    download_dir: str | None = Field(
        None, description="Directory for what is downloaded, extracted or installed; without it ~/.cache/lmi-server."
    )
    log_level: LogLevel = Field("info", description="Least important messages that are logged.")


# Keys of config.properties that are defaults of every model's keys.
_MODEL_DEFAULTS = ("job_queue_size", "batch_size", "max_batch_delay", "max_idle_time", "load_on_devices")
_ADDRESSES = ("inference_address", "management_address")
_ADDRESS = re.compile(r"http://([\w.-]+)(?::(\d{1,5}))?/?", re.ASCII)


def resolve_server(
    environment: Mapping[str, str], command_line: Mapping[str, Any], config_file: Path | None = None
) -> tuple[ServerSettings, tuple[str, ...]]:
    """Return the settings and warnings: command line over `SERVING_*` over `config_file` over defaults.

    `command_line` holds values by field name, None where none was given. Raises ConfigurationError with every problem,
    one a line.
    """
    declared = ServerSettings.declared()
    problems: list[str] = []
    layers = [from_variables("environment", env.server_variables(environment)), _from_config_file(config_file)]
    found = [sort_keys(_with_address(layer, problems), declared) for layer in layers]
    options = {option.key: str(command_line[option.field]) for option in declared if _given(command_line, option)}
    given = merge([from_values("command line", options), *(layer.known for layer in found)])
    settings, wrong = build(ServerSettings, given)
    if problems or wrong:
        raise ConfigurationError("\n".join([*problems, *wrong.values()]))
    warnings = [text for layer in found for text in layer.warnings]
    warnings += [
        unknown_key_warning(key, source, spellings(declared))
        for layer in found
        for key, source in layer.unknown.items()
        if key not in _MODEL_DEFAULTS
    ]
    return settings, tuple(warnings)


def model_defaults(config_file: Path) -> dict[str, str]:
    """Return what config.properties says for every model, as the `SERVING_*` variables that say the same."""
    given = _from_config_file(config_file)
    return {f"SERVING_{key.upper()}": given[key].raw for key in _MODEL_DEFAULTS if key in given}


def _from_config_file(path: Path | None) -> Given:
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigurationError(f"{path}: there is no such file")
    return from_file(read_properties(path), str(path))


def _with_address(layer: Given, problems: list[str]) -> Given:
    """Return the layer with LMI's `inference_address` and `management_address` as `host` and `port`."""
    rest = {key: source for key, source in layer.items() if key not in _ADDRESSES}
    for source in (layer[key] for key in _ADDRESSES if key in layer):
        match = _ADDRESS.fullmatch(source.raw)
        if match is None:
            problems.append(f'{source.where}: "{source.raw}" is not allowed; allowed: http://host:port')
            continue
        address = {"host": match[1], "port": match[2] or "80"}
        for key, value in address.items():
            if rest.setdefault(key, replace(source, raw=value)).raw != value:
                problems.append(
                    f'{source.where}: "{source.raw}" is not available in this version; one address serves inference '
                    "and management, give both the same"
                )
                break
    return rest


def _given(command_line: Mapping[str, Any], option: Option) -> bool:
    return command_line.get(option.field) is not None
