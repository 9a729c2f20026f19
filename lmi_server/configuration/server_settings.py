"""Settings of the server itself, not of a model, from command line, `SERVING_*`, config.properties and defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field

from lmi_server.configuration.declaration import Allowed, FeatureSettings, Key, Options, feature_parts
from lmi_server.configuration.idle_variables import idle_variables
from lmi_server.configuration.layers import (
    Given,
    Source,
    build,
    from_file,
    from_values,
    from_variables,
    merge,
    sort_keys,
    spellings,
    unknown_key_warning,
    value_advice,
)
from lmi_server.configuration.options import NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds
from lmi_server.configuration.properties import read_properties
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import one_line
from lmi_server.features import FEATURES, load
from lmi_server.machine import environment as env

_InLowerCase = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "off"], _InLowerCase]
LogFormat = Annotated[Literal["text", "json"], _InLowerCase]
LogStream = Annotated[Literal["stderr", "stdout"], _InLowerCase]

EXTRA_LOGS = ("access", "model_metric", "server_metric")


def _names(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(name for name in re.split(r"[,\s]+", value.strip()) if name)
    return value


ExtraLogs = Annotated[
    tuple[Literal["access", "model_metric", "server_metric"], ...],
    BeforeValidator(_names),
    Allowed(f"names separated by commas: {', '.join(EXTRA_LOGS)}"),
]


MetricNames = Annotated[
    tuple[Literal["djl_serving", "vllm"], ...],
    BeforeValidator(_names),
    Allowed("names separated by commas: djl_serving, vllm; or nothing"),
]


Names = Annotated[tuple[str, ...], BeforeValidator(_names), Allowed("texts separated by commas")]
# One colon is that of a port; an IPv6 address has more.
_HostName = Annotated[str, Field(pattern=r"^([^/:]+|[^/:]*:[^/:]*:[^/]*)$")]
HostNames = Annotated[
    tuple[_HostName, ...],
    BeforeValidator(_names),
    Allowed("names without https:// and without a port, separated by commas; * for any"),
]

_DURATION = r"P(?:(?P<days>\d+)D)?(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)S)?)?"
_ERROR_RATE = re.compile(rf"(?P<errors>\d{{1,6}})(?:/{_DURATION})?", re.IGNORECASE | re.ASCII)
_DEFAULT_WINDOW = timedelta(minutes=1)


class ErrorRate(NamedTuple):
    """How many errors are allowed within how many seconds."""

    errors: int
    seconds: float


def _error_rate(value: Any) -> Any:
    """Return the ErrorRate that a text such as "10/PT5M" means. Without a time (in ISO 8601's form) it is a minute."""
    found = _ERROR_RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    parts = {unit: int(text) for unit, text in found.groupdict("0").items()}
    errors = parts.pop("errors")
    return ErrorRate(errors, (timedelta(**parts) or _DEFAULT_WINDOW).total_seconds())


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(str(error)) from error
    return pattern


ErrorRateLimit = Annotated[
    ErrorRate | None,
    BeforeValidator(_error_rate),
    Allowed("errors/time, such as 10/PT5M for ten in five minutes; without a time it is one minute"),
]
ErrorStatus = Annotated[int, Field(ge=400, le=599), Allowed("a status of an error, from 400 to 599")]
PingStatus = Annotated[int, Field(ge=200, le=599), Allowed("a status, from 200 to 599")]
HeaderValue = Annotated[str | None, Field(pattern=r"^[\x20-\x7e]+$"), Allowed("a text in ASCII, on one line")]


_FeatureSettings = TypeVar("_FeatureSettings", bound=FeatureSettings)
_Settings = TypeVar("_Settings", bound=Options)


def _with_features(core: type[_Settings]) -> type[_Settings]:
    """Return the class with the settings of every feature of the table as further bases."""
    parts = [cast("type[_Settings]", load(path)) for feature in FEATURES for path in feature.settings]
    return type(core.__name__, (*parts, core), {"__doc__": core.__doc__, "__module__": core.__module__})


@_with_features
class ServerSettings(Options):
    """Settings of the front end, with LMI's names if LMI has such a key."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: Annotated[int, Field(ge=0, le=65535), Allowed("an integer from 0 to 65535")] = Field(
        8080, description="Port to listen on; 0 lets the system choose one. SAGEMAKER_BIND_TO_PORT sets it, too."
    )
    management_host: str | None = Field(
        None, description="Address of the management API, if it differs from that for requests."
    )
    management_port: Annotated[int | None, Field(ge=0, le=65535), Allowed("an integer from 0 to 65535")] = Field(
        None, description="Port of the management API; if not set, the port for requests serves both."
    )
    api_keys: str | None = Field(
        None,
        description="API keys for requests, with commas between: KEY or sha256:DIGEST [max_concurrent_requests=N].",
    )
    api_keys_file: str | None = Field(None, description="File with API keys for requests, one in each line.")
    management_api_keys: str | None = Field(
        None, description="API keys for the management API and metrics; any client with one may manage models."
    )
    management_api_keys_file: str | None = Field(None, description="File with API keys for the management API.")
    management_clients: Literal["local", "any"] | None = Field(
        None,
        description="Who may manage models without management_api_keys: clients on this machine, or any. If not set, "
        "clients on this machine, or none once api_keys or api_keys_file is set.",
    )
    allowed_hosts: HostNames = Field((), description="Further names under which the server is called (header Host).")
    registration_sources: Names | None = Field(
        None,
        description="What a registration may name, * for everything: directories, s3://bucket/prefix, hub ids, owner/. "
        "If not set, clients on this machine may name everything, others what is in model_store.",
    )
    tls: bool = Field(False, description="TLS on the address for requests; https:// in inference_address sets it.")
    management_tls: bool | None = Field(None, description="As tls, on the address for management; as tls if not set.")
    certificate_file: str | None = Field(None, description="Certificate of the server, with its chain, in PEM.")
    private_key_file: str | None = Field(None, description="Key of certificate_file in PEM.")
    keystore: str | None = Field(None, description="File with certificate and key, instead of the two in PEM.")
    keystore_pass: str = Field("changeit", description="Password of keystore, or of an encrypted private_key_file.")
    keystore_type: str = Field("PKCS12", description="Format of keystore; PKCS12 is the only one.")
    unix_socket_mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$"), Allowed("an octal number such as 660")] = Field(
        "600", description="Permissions of a Unix socket that an address names (unix:/path)."
    )
    max_request_size: PositiveInt = Field(67108864, description="Largest request body in bytes.")
    max_buffered_size: PositiveInt = Field(
        1073741824,
        description="Bytes of all request bodies together, decoded ones and those of asynchronous jobs included, from "
        "which on bodies over 64 KiB are refused with 503; max_request_size if that is more.",
    )
    max_unread_size: PositiveInt = Field(
        1073741824,
        description="Bytes of answers that clients have not read, all together, from which on the slowest are dropped.",
    )
    max_connections: PositiveInt | None = Field(
        None, description="Most clients that are connected at once; if not set, the limit of open files less 200."
    )
    request_head_timeout: Seconds = Field(
        60.0, description="Seconds that a client has for request line and headers, and for its first byte."
    )
    request_body_timeout: Seconds = Field(60.0, description="Seconds that a client may pause while it sends a body.")
    response_read_timeout: Seconds = Field(
        60.0, description="Seconds for which a client may read nothing of an answer that waits for it."
    )
    min_transfer_rate: NonNegativeInt = Field(
        500,
        description="Bytes a second that a client must send of a body, and read of an answer that waits for it, on "
        "average after the seconds of request_body_timeout and response_read_timeout; 0 for any rate.",
    )
    keep_alive_timeout: Seconds = Field(
        75.0,
        description="Seconds that a connection waits for its next request; longer than a load balancer in front waits.",
    )
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number of seconds, 0 or more")] = (
        Field(30.0, description="Seconds that running requests have to finish after SIGTERM; the rest ends in 2 more.")
    )
    request_id_header: Annotated[str, Field(min_length=1), Key("request_id_header_key")] = Field(
        "x-request-id", description="Header with the id of a request."
    )
    cors_allowed_origin: HeaderValue = Field(None, description="Access-Control-Allow-Origin of every answer.")
    cors_allowed_methods: HeaderValue = Field(None, description="Access-Control-Allow-Methods of every answer.")
    cors_allowed_headers: HeaderValue = Field(None, description="Access-Control-Allow-Headers of every answer.")
    throttle_error_http_code: ErrorStatus = Field(503, description="Status if the job queue of a model is full.")
    wlm_error_http_code: ErrorStatus = Field(
        503, description="Status if a model is not ready, or its worker ended or made no progress for predict_timeout."
    )
    bad_request_http_code: Annotated[ErrorStatus, Key(also=("bad_request_error_http_code",))] = Field(
        400, description="Status if the server itself refuses an inference request, such as one that names no model."
    )
    error_rate_wlm: ErrorRateLimit = Field(
        None,
        description="More errors than this that have throttle_error_http_code or wlm_error_http_code make /ping answer "
        "503 until a restart.",
    )
    error_rate_server: ErrorRateLimit = Field(
        None, description="As error_rate_wlm, for other answers with status 500 and above."
    )
    error_rate_model: ErrorRateLimit = Field(None, description="As error_rate_wlm, for answers with status 424.")
    error_rate_any: ErrorRateLimit = Field(None, description="As error_rate_wlm, for all these errors together.")
    model_url_pattern: Annotated[str | None, AfterValidator(_compilable), Allowed("a regular expression")] = Field(
        None,
        description="A request for an unknown model registers it if its header, query or form has a model_url that "
        "matches this as a whole.",
    )
    model_store: str | None = Field(
        None,
        description="Directory with models, directories or archives; a relative path starts at $MODEL_SERVER_HOME.",
    )
    load_models: Annotated[str, Field(min_length=1)] = Field(
        "ALL",
        description="Models to load at the start: ALL of the model store, NONE, or [name:version:engine:devices]=url.",
    )
    download_dir: str | None = Field(
        None, description="Directory for downloaded models and installed packages; ~/.cache/lmi-server if not set."
    )
    unused_environments_gb: NonNegativeFloat = Field(
        20.0,
        description="GiB that environments of option.engine_version and option.engine_requirements may take which no "
        "model uses; the least recently used are removed when another model with one loads.",
    )
    wait_model_loading: bool = Field(
        True,
        description="End the server with exit code 1 if a model of the start cannot be loaded; false serves the rest.",
    )
    require_model: bool = Field(
        False,
        description="End the server with exit code 1 if it would start without any model. SAGEMAKER_MULTI_MODEL=true, "
        "where models are registered later, and load_models=NONE overrule it.",
    )
    reload_on_change: bool = Field(
        False,
        description="Load a model again when its serving.properties changes, beside its workers; if that fails, they "
        "serve on.",
    )
    allow_multi_status: bool = Field(
        False, description="Answer /ping with 207 while one model can serve and another is loading or cannot."
    )
    ping_loading_http_code: PingStatus = Field(
        503, description="Status of /ping while a model of the start is loading for the first time."
    )
    ping_restarting_http_code: PingStatus = Field(
        200,
        description="Status of /ping while a model of the start, which has served before, has no ready worker. "
        "SAGEMAKER_HEALTH_CHECK_OVERRIDE=true sets it to 500.",
    )
    ping_failed_http_code: PingStatus = Field(
        500, description="Status of /ping if a model of the start has failed for good."
    )
    unload_idle_models: bool = Field(
        False,
        description="Unload models without requests, the least recently used first, if another model finds too little "
        "memory; models of the start stay. Otherwise that model is refused with 507, and SageMaker unloads others.",
    )
    fail_fast: bool = Field(
        False, description="Drain and stop the server, with exit code 1, as soon as a model of the start fails."
    )
    log_level: LogLevel = Field("info", description="Lowest level of messages that are logged.")
    log_stream: LogStream = Field(
        "stderr",
        description="Where the log goes: standard error, or standard output with all that standard error gets.",
    )
    log_format: LogFormat = Field(
        "text", description="Form of the server's own lines: text, or an object in JSON each."
    )
    access_log: Annotated[Literal["off", "text", "json"], _InLowerCase] = Field(
        "off", description="A line for each inference request in the server's log: off, as text or in JSON."
    )
    access_log_sample: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")] = Field(
        1.0, description="Share of the answers below status 400 that get a line of access_log; all others do."
    )
    log_prompts: bool = Field(False, description="The body of each request, cut at 8 KiB, in its line of access_log.")
    metric_names: MetricNames = Field(
        ("djl_serving", "vllm"),
        description="Further names under which /metrics shows what it measures, beside names that begin with lmi_.",
    )
    extra_logs: ExtraLogs | None = Field(
        None,
        description="Logs beside the server's own, in LMI's formats; if not set, all three with log_dir, else none.",
    )
    log_dir: str | None = Field(
        None,
        description="Directory for extra_logs: access.log, model_metric.log, server_metric.log; or standard error.",
    )

    def part(self, kind: type[_FeatureSettings]) -> _FeatureSettings:
        """Return these settings as a feature's, which they include while its entry is in the table."""
        assert isinstance(self, kind)
        return self

    @property
    def holds_secrets(self) -> bool:
        """Return whether the memory of the server has keys or passwords that its clients or this machine share."""
        keys = (self.api_keys, self.api_keys_file, self.management_api_keys, self.management_api_keys_file)
        of_features = (getattr(self, name) for part in feature_parts(type(self)) for name in part.secrets)
        return any((*keys, self.private_key_file, self.keystore, *of_features))

    @property
    def error_rates(self) -> dict[str, ErrorRate]:
        """Return the limits that are set, by the end of their keys."""
        limits = {
            "wlm": self.error_rate_wlm,
            "server": self.error_rate_server,
            "model": self.error_rate_model,
            "any": self.error_rate_any,
        }
        return {kind: limit for kind, limit in limits.items() if limit is not None}

    @property
    def written_logs(self) -> tuple[str, ...]:
        """Return which of LMI's logs are written."""
        return self.extra_logs if self.extra_logs is not None else EXTRA_LOGS if self.log_dir else ()


# Keys of config.properties that set defaults for all models.
MODEL_DEFAULTS = (
    "job_queue_size",
    "batch_size",
    "max_batch_delay",
    "max_idle_time",
    "load_on_devices",
    "reserved_memory_mb",
)
# LMI's other keys, and what a user should know who sets one.
WITHOUT_EFFECT = {
    "opts": "there is no JVM; of its flags only log4j2.configurationFile has a meaning",
    "features": "installed engines are detected",
    "prometheus": "/metrics is always on",
    "health_check_override": "ping_failed_http_code=200 keeps a model that has failed from failing /ping",
    "chunked_read_timeout": "option.predict_timeout limits how long a request may make no progress",
    **dict.fromkeys(("number_of_netty_threads", "use_native_io", "io_ratio"), "the server has one event loop"),
    **dict.fromkeys(("cluster_address", "plugin_folder", "WEB_ROOT"), "the server has no such feature"),
    "cache_batch": "an answer is stored when its job has ended",
    "cache_multitenant": "each job has a token of its own",
    "timeout_http_code": "wlm_error_http_code is the status of a request that made no progress",
    "server_error_http_code": "an error of the server itself is a 500",
    **dict.fromkeys(("grpc_address", "grpc_port"), "the server does not speak gRPC"),
}
_CONFIG = "config.properties"
ADDRESSES = ("inference_address", "management_address")
_ADDRESS = re.compile(r"(https?)://([\w.-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?/?", re.ASCII)
_PORTS = {"http": "80", "https": "443"}
UNIX = "unix:"  # before the path of a Unix socket, as LMI has it


def resolve_server(
    environment: Mapping[str, str], command_line: Mapping[str, Any], config_file: Path | None = None
) -> tuple[ServerSettings, tuple[str, ...]]:
    """Return settings and warnings: the command line wins over `SERVING_*`, `config_file` and defaults, in this order.

    `command_line` holds values by field name, None if not given. Raises ConfigurationError with all
    problems, one per line.
    """
    declared = ServerSettings.declared_options()
    problems: list[str] = []
    # The command line is a layer of its own below, because its keys need no sorting: typer knows them all.
    layers = [from_variables("environment", env.server_variables(environment)), _from_config_file(config_file)]
    found = [sort_keys(_with_address(layer, problems), declared) for layer in layers]
    values = ((option.key, command_line.get(option.field)) for option in declared)
    options = {key: str(value) for key, value in values if value is not None}
    given = merge([from_values("command line", options), *(layer.known for layer in found)])
    settings, wrong = build(ServerSettings, given)
    try:
        safe_ports = env.safe_ports(environment)
    except ValueError as error:
        problems.append(f"variable SAGEMAKER_SAFE_PORT_RANGE: {error}")
    if problems or wrong:
        raise ConfigurationError.from_problems([*problems, *wrong.values()])
    warnings = [text for layer in found for text in layer.warnings]
    warnings += [
        _without_effect(key, source) if key in WITHOUT_EFFECT else unknown_key_warning(key, source, spellings(declared))
        for layer in found
        for key, source in layer.unknown.items()
        if key not in MODEL_DEFAULTS
    ]
    if safe_ports is not None and settings.management_port not in (None, settings.port, *safe_ports):
        warnings.append(f"management_port = {settings.management_port} is not in SAGEMAKER_SAFE_PORT_RANGE")
    return settings, tuple(map(one_line, (*warnings, *idle_variables(environment))))


def server_home(environment: Mapping[str, str], directory: Path) -> Path:
    """Return the directory that relative paths of LMI's settings refer to: MODEL_SERVER_HOME, or else `directory`."""
    return Path(environment.get("MODEL_SERVER_HOME") or directory)


def find_config_file(environment: Mapping[str, str], directory: Path) -> Path | None:
    """Return the config.properties in LMI's places: below MODEL_SERVER_HOME, or else below `directory`."""
    home = server_home(environment, directory)
    return next((path for path in (home / "conf" / _CONFIG, home / _CONFIG) if path.is_file()), None)


def model_defaults(config_file: Path) -> dict[str, str]:
    """Return the defaults for all models in config.properties, as the `SERVING_*` variables that mean the same."""
    given = _from_config_file(config_file)
    return {f"SERVING_{key.upper()}": given[key].raw for key in MODEL_DEFAULTS if key in given}


def _from_config_file(path: Path | None) -> Given:
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    return from_file(read_properties(path), str(path))


def _with_address(layer: Given, problems: list[str]) -> Given:
    """Return the layer with LMI's `inference_address` and `management_address` as hosts and ports."""
    rest = {key: source for key, source in layer.items() if key not in ADDRESSES}
    inference, management = (_address(key, layer[key], problems) if key in layer else {} for key in ADDRESSES)
    rest |= inference
    # Under LMI, equal addresses mean one port for both; only a different address opens a second one.
    if management and [source.raw for source in management.values()] != [source.raw for source in inference.values()]:
        rest |= {f"management_{key}": source for key, source in management.items()}
    return rest


def _address(key: str, source: Source, problems: list[str]) -> dict[str, Source]:
    if source.raw.startswith(f"{UNIX}/"):
        return {"host": source}
    match = _ADDRESS.fullmatch(source.raw)
    if match is None:
        allowed = "http://host:port, https://host:port or unix:/path"
        problems.append(
            f'{source.place}: {key} = "{source.raw}" is not allowed; allowed: {allowed}{value_advice(source, allowed)}'
        )
        return {}
    scheme, host, port = match.groups()
    values = {"host": host.strip("[]"), "port": port or _PORTS[scheme], "tls": str(scheme == "https").lower()}
    return {name: replace(source, raw=value) for name, value in values.items()}


def _without_effect(key: str, source: Source) -> str:
    return f"{source.place}: {key} has no effect in this version: {WITHOUT_EFFECT[key]}"
