"""Reads environment variables about models and the server; no other module reads the environment.

Everything else takes the variables as a mapping. The names and their precedence are LMI's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmi_server.contract.ranks import Rank

# Open MPI, PMIx, MPICH
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_GROUP_DIRECTORY = "LMI_RANK_GROUP"

# SERVING_SERVICE_HOST and _PORT, and in Docker's form SERVING_PORT=tcp://address:port and SERVING_PORT_8080_TCP_ADDR.
_ABOUT_A_SERVICE = re.compile(
    r"SERVING_(SERVICE_(HOST|PORT\w*)=.*|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)\w*=.*)", re.ASCII
)
_ALL_CAPS = re.compile(r"[A-Z0-9_]+")

# OPTION_ variables whose key is not just the lower-cased rest of the name.
_OPTION_NAMES = {"ENTRYPOINT": "option.entryPoint", "ENGINE": "engine"}

_SAGEMAKER = {
    "SAGEMAKER_NUM_MODEL_WORKERS": ("minWorkers", "maxWorkers"),
    "SAGEMAKER_MODEL_SERVER_WORKERS": ("minWorkers", "maxWorkers"),
    "SAGEMAKER_STARTUP_TIMEOUT": ("option.model_loading_timeout",),
    "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": ("option.predict_timeout",),
    "SAGEMAKER_MODEL_SERVER_TIMEOUT": ("option.predict_timeout",),
    "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": ("option.default_accept",),
}
_PORT_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
_LOG_LEVELS = {"10": "debug", "20": "info", "30": "warning", "40": "error", "50": "error"}
_HUGGING_FACE = {"HF_MODEL_ID": "option.model_id", "HF_REVISION": "option.revision", "HF_TASK": "option.task"}
_MODEL_DEFAULTS = {
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "SM_NUM_GPUS": "option.tensor_parallel_degree",
    "PIPELINE_PARALLEL_DEGREE": "option.pipeline_parallel_degree",
    "PYTHON_EXECUTABLE": "option.pythonExecutable",
    "MODEL_LOADING_TIMEOUT": "option.model_loading_timeout",
    "PREDICT_TIMEOUT": "option.predict_timeout",
    "DJL_ENTRY_POINT": "option.entryPoint",
}
# The names of text-generation-inference. Each counts as the OPTION_ variable of its keys if that one is not set.
_TEXT_GENERATION_INFERENCE = {
    "HF_MODEL_QUANTIZE": ("option.quantize",),
    "HF_MODEL_TRUST_REMOTE_CODE": ("option.trust_remote_code",),
    "HF_TRUST_REMOTE_CODE": ("option.trust_remote_code",),
    "MAX_BATCH_PREFILL_TOKENS": ("option.max_rolling_batch_prefill_tokens",),
    "MAX_BATCH_SIZE": ("option.max_rolling_batch_size",),
    "ENABLE_CUDA_GRAPHS": ("option.enforce_eager",),
    "CUDA_MEMORY_FRACTION": ("option.gpu_memory_utilization", "option.kv_cache_free_gpu_mem_fraction"),
}
_OPPOSITES = {
    a: b for yes, no in (("true", "false"), ("1", "0"), ("yes", "no"), ("on", "off")) for a, b in ((yes, no), (no, yes))
}
_GLOBAL_DEFAULTS = {
    "SERVING_JOB_QUEUE_SIZE": "job_queue_size",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
    "SERVING_BATCH_SIZE": "batch_size",
    "SERVING_MAX_BATCH_DELAY": "max_batch_delay",
    "SERVING_MAX_IDLE_TIME": "max_idle_time",
    "SERVING_LOAD_ON_DEVICES": "load_on_devices",
    "SERVING_RESERVED_MEMORY_MB": "reserved_memory_mb",
    "SERVING_MIN_WORKERS": "minWorkers",
    "SERVING_MAX_WORKERS": "maxWorkers",
    "SERVING_RETRY_THRESHOLD": "retry_threshold",
}

SECRETS_OF_SERVER = (
    "SERVING_API_KEYS",
    "SERVING_MANAGEMENT_API_KEYS",
    "SERVING_KEYSTORE_PASS",
    "SERVING_SIGV4_KEYS",
)
"""Variables with keys and passwords of the server itself, which workers do not get."""

# Flags of LMI's JVM, and which of its logs the configurations that LMI ships print to the console.
JVM_FLAGS = ("DEFAULT_JVM_OPTS", "JAVA_OPTS", "SERVING_OPTS")
_LOG_CONFIGURATION = re.compile(r"-Dlog4j2?\.configurationFile=\S*\blog4j2-(access|console)\.xml\b")
_LOGS = {"access": "access", "console": "access,model_metric,server_metric"}

# OpenMP threads spin while they wait for the next operation. libgomp's default is to spin for milliseconds, which takes
# the time slices of the front end and of the kernel's network work on the same cores.
THREAD_VARIABLES: Mapping[str, str] = {"GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"}
"""Variables for the libraries of a worker, so that it shares the cores with the front end."""

SAGEMAKER_SETTINGS = (
    *("SAGEMAKER_BIND_TO_PORT", "SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB"),
    *("SAGEMAKER_CONTAINER_LOG_LEVEL", "SAGEMAKER_HEALTH_CHECK_OVERRIDE"),
)
"""SageMaker's variables that are settings of the server."""

VARIABLES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "SageMaker": _SAGEMAKER,
    "as OPTION_": {**{name: (key,) for name, key in _HUGGING_FACE.items()}, **_TEXT_GENERATION_INFERENCE},
    "defaults": {name: (key,) for name, key in (*_MODEL_DEFAULTS.items(), *_GLOBAL_DEFAULTS.items())},
}
"""Every variable with a name of its own, and the full keys that it stands for, by layer."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable that stands for a full key ("option.dtype", "job_queue_size")."""

    name: str
    key: str
    value: str


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, for libraries that read them later."""
    os.environ.update(values)


def remove_variables(names: Iterable[str]) -> None:
    """Remove environment variables of this process; /proc still shows what it was started with."""
    for name in names:
        os.environ.pop(name, None)


def add_flags(name: str, flags: Sequence[str]) -> None:
    """Append missing flags to variable `name`, for libraries that read it later."""
    present = os.environ.get(name, "").split(" ")
    joined = " ".join((*present, *(flag for flag in flags if flag not in present))).strip()
    if joined:
        os.environ[name] = joined


def set_region() -> None:
    """Have the AWS libraries use the region that SageMaker's SDK names, unless they know one."""
    for region in _values_of(os.environ, "SAGEMAKER_REGION"):
        if not any(os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
            os.environ["AWS_DEFAULT_REGION"] = region


def without_secrets_of_server(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the server's own keys and passwords, and remove them from this process too.

    Otherwise workers, and pip for the requirements of a model, would inherit them.
    """
    remove_variables(SECRETS_OF_SERVER)
    return {name: value for name, value in environment.items() if name not in SECRETS_OF_SERVER}


def log_stream(environment: Mapping[str, str]) -> str:
    """Return the value of the setting `log_stream`, for messages about settings that cannot be read."""
    return environment.get("SERVING_LOG_STREAM", "").strip().lower()


def log_format(environment: Mapping[str, str]) -> str:
    """Return the value of the setting `log_format`, for messages about settings that cannot be read."""
    return environment.get("SERVING_LOG_FORMAT", "").strip().lower()


def safe_ports(environment: Mapping[str, str]) -> range | None:
    """Return the ports that SageMaker leaves to this container beside its own; None if it does not say.

    The containers of an inference pipeline share one network. Raises ValueError if the range cannot be read.
    """
    for value in _values_of(environment, "SAGEMAKER_SAFE_PORT_RANGE"):
        found = _PORT_RANGE.fullmatch(value)
        ports = range(0) if found is None else range(int(found[1]), int(found[2]) + 1)
        if not ports or not 0 < ports[0] <= ports[-1] <= 65535:
            raise ValueError(f'"{value}" is not allowed; allowed: two ports with a hyphen between, such as 21000-21999')
        return ports
    return None


def sagemaker_program(environment: Mapping[str, str]) -> str:
    """Return the name of the script that SageMaker's framework containers run."""
    return environment.get("SAGEMAKER_PROGRAM", "").strip() or "inference.py"


def is_multi_model(environment: Mapping[str, str]) -> bool:
    """Return whether SageMaker says that this server is one of a multi-model endpoint."""
    return environment.get("SAGEMAKER_MULTI_MODEL", "").strip().lower() == "true"


def sagemaker_overrides(environment: Mapping[str, str]) -> list[Variable]:
    """Return SageMaker's variables, which override everything else."""
    return [
        Variable(name, key, value)
        for name, keys in _SAGEMAKER.items()
        for value in _values_of(environment, name)
        for key in keys
    ]


def model_variables(environment: Mapping[str, str]) -> list[Variable]:
    """Return `OPTION_*` and `ARGS_*`: keys that serving.properties does not set."""
    found = []
    for name in sorted(environment):
        for value in _values_of(environment, name):
            if name.startswith("OPTION_"):
                found.append(Variable(name, _option_key(name.removeprefix("OPTION_")), value))
            elif name.startswith("ARGS_"):
                found.append(Variable(name, _lower_capitals(name.removeprefix("ARGS_")), value))
    return found


def hugging_face_variables(environment: Mapping[str, str]) -> list[Variable]:
    """Return `HF_MODEL_ID` with `HF_REVISION` and `HF_TASK`, which mean nothing without it."""
    if not list(_values_of(environment, "HF_MODEL_ID")):
        return []
    return _variables(environment, _HUGGING_FACE)


def text_generation_inference_variables(environment: Mapping[str, str]) -> list[Variable]:
    """Return variables of text-generation-inference; handlers without such a key ignore them."""
    return [
        Variable(name, key, _OPPOSITES.get(value.lower(), value) if name == "ENABLE_CUDA_GRAPHS" else value)
        for name, keys in _TEXT_GENERATION_INFERENCE.items()
        for value in _values_of(environment, name)
        for key in keys
    ]


def default_variables(environment: Mapping[str, str]) -> list[Variable]:
    """Return the layer just above the defaults: `TENSOR_PARALLEL_DEGREE` and the like, then `SERVING_*` globals."""
    return _variables(environment, _MODEL_DEFAULTS) + _variables(environment, _GLOBAL_DEFAULTS)


def server_variables(environment: Mapping[str, str]) -> list[Variable]:
    """Return `SERVING_*` settings of the server itself by their lower-cased names, and those of other variables.

    The others are SageMaker's, the directory of LMI's downloads, and the logs that a flag of LMI's JVM asks for.
    Kubernetes gives every container variables about its services; those about one called "serving" are no settings.
    """
    found = [
        Variable(name, name.removeprefix("SERVING_").lower(), value)
        for name in sorted(environment)
        if name.startswith("SERVING_") and name not in _GLOBAL_DEFAULTS
        for value in _values_of(environment, name)
        if not _ABOUT_A_SERVICE.fullmatch(f"{name}={value}")
    ]
    ports = _variables(environment, {"SAGEMAKER_BIND_TO_PORT": "port"})
    return [
        *ports,
        *_sagemaker_request_limit(environment),
        *found,
        *_variables(environment, {"DJL_CACHE_DIR": "download_dir"}),
        *_sagemaker_log_level(environment),
        *_sagemaker_ping_code(environment),
        *_logs_of_jvm_flags(environment),
    ]


def _sagemaker_log_level(environment: Mapping[str, str]) -> Iterator[Variable]:
    """Yield the log level, which SageMaker's SDK gives as a number of Python's logging."""
    for value in _values_of(environment, "SAGEMAKER_CONTAINER_LOG_LEVEL"):
        yield Variable("SAGEMAKER_CONTAINER_LOG_LEVEL", "log_level", _LOG_LEVELS.get(value, value))


def _sagemaker_ping_code(environment: Mapping[str, str]) -> Iterator[Variable]:
    for value in _values_of(environment, "SAGEMAKER_HEALTH_CHECK_OVERRIDE"):
        if value.lower() == "true":
            yield Variable("SAGEMAKER_HEALTH_CHECK_OVERRIDE", "ping_restarting_http_code", "500")


def asks_for_logs(flags: str) -> bool:
    """Return whether flags of LMI's JVM name one of the configurations that print LMI's logs."""
    return _LOG_CONFIGURATION.search(flags) is not None


def _logs_of_jvm_flags(environment: Mapping[str, str]) -> Iterator[Variable]:
    for name in JVM_FLAGS:
        for value in _values_of(environment, name):
            asked = _LOG_CONFIGURATION.search(value)
            if asked is not None:
                yield Variable(name, "extra_logs", _LOGS[asked[1]])


def _sagemaker_request_limit(environment: Mapping[str, str]) -> Iterator[Variable]:
    for value in _values_of(environment, "SAGEMAKER_MAX_REQUEST_SIZE"):
        yield Variable("SAGEMAKER_MAX_REQUEST_SIZE", "max_request_size", value)
        return
    for value in _values_of(environment, "SAGEMAKER_MAX_PAYLOAD_IN_MB"):
        size = str(int(value) * 1024 * 1024) if value.isascii() and value.isdigit() else value
        yield Variable("SAGEMAKER_MAX_PAYLOAD_IN_MB", "max_request_size", size)


def _variables(environment: Mapping[str, str], names: Mapping[str, str]) -> list[Variable]:
    return [Variable(name, key, value) for name, key in names.items() for value in _values_of(environment, name)]


def _values_of(environment: Mapping[str, str], name: str) -> Iterator[str]:
    """Yield the value of the variable, if it has one; an empty variable counts as not set."""
    value = environment.get(name, "").strip()
    if value:
        yield value


def _option_key(rest: str) -> str:
    return _OPTION_NAMES.get(rest) or "option." + _lower_capitals(rest)


def _lower_capitals(name: str) -> str:
    return name.lower() if _ALL_CAPS.fullmatch(name) else name


def take_rank(directory: str) -> Rank:
    """Return the rank of this process from mpirun's variables, and set torch.distributed's.

    `directory` is that of the group. Raises RuntimeError if mpirun has set none of its variables.
    """
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)
    if rank is None:
        raise RuntimeError(f"mpirun has set none of {', '.join(_RANK_VARIABLES)}")
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = rank  # all ranks are on this machine
    os.environ[_GROUP_DIRECTORY] = directory
    return Rank(int(rank), int(os.environ["WORLD_SIZE"]), directory)


def extend_python_path(*directories: str) -> None:
    """Have Python processes that this one starts search `directories` for modules, last."""
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([inherited] if inherited else []), *directories])


def meeting_point() -> str:
    """Return the address at which the ranks of this group meet, in torch.distributed's form (tcp://host:port)."""
    return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def own_rank() -> Rank:
    """Return the rank of this process: rank 0 of 1 if it is in no group."""
    directory = os.environ.get(_GROUP_DIRECTORY)
    if directory is None:
        return Rank(0, 1, "")
    return Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), directory)
