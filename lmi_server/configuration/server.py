"""Settings of the server itself, as opposed to those of a model: command line over `SERVING_*` over defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lmi_server.configuration import environment as env
from lmi_server.configuration.check import build
from lmi_server.configuration.declaration import Allowed, Key, Option, Options
from lmi_server.configuration.layers import from_values, from_variables, merge, sort_keys, unknown_key_warning
from lmi_server.configuration.options import PositiveInt
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
    log_level: LogLevel = Field("info", description="Least important messages that are logged.")


def resolve_server(
    environment: Mapping[str, str], command_line: Mapping[str, Any]
) -> tuple[ServerSettings, tuple[str, ...]]:
    """Return the settings and warnings.

    `command_line` holds values by field name, None where none was given. Raises ConfigurationError with every problem,
    one a line.
    """
    declared = ServerSettings.declared()
    variables = sort_keys(from_variables("environment", env.server_variables(environment)), declared)
    options = {option.key: str(command_line[option.field]) for option in declared if _given(command_line, option)}
    settings, problems = build(ServerSettings, merge([from_values("command line", options), variables.known]))
    if problems:
        raise ConfigurationError("\n".join(problems))
    warnings = [unknown_key_warning(key, source, declared) for key, source in variables.unknown.items()]
    return settings, (*variables.warnings, *warnings)


def _given(command_line: Mapping[str, Any], option: Option) -> bool:
    return command_line.get(option.field) is not None
