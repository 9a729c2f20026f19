"""Variables of SageMaker's and LMI's containers that have no effect here. Each one that is set gets a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lmi_server.configuration.layers import nearest_key
from lmi_server.machine import environment as env

_ONE_MACHINE = "a model is served by one machine"
_NO_JVM = "there is no JVM"
_NO_LIMIT = "the size of an answer has no limit"
_TELEMETRY = "no telemetry is collected"
_WITHOUT_EFFECT = {
    "SAGEMAKER_MODEL_SERVER_VMARGS": _NO_JVM,
    "SAGEMAKER_MAX_RESPONSE_SIZE": _NO_LIMIT,
    "SAGEMAKER_MODEL_STORE": "SERVING_MODEL_STORE names the directory of the models",
    "SAGEMAKER_HANDLER": "option.entryPoint names the code of a model (OPTION_ENTRYPOINT)",
    "SAGEMAKER_SERVE_SECRET_KEY": "models that SageMaker's ModelBuilder has packed are not served",
    "SAGEMAKER_ENABLE_CLOUDWATCH_METRICS": "/metrics has the metrics",
    "SM_TELEMETRY_LOG_REV_2022_12": _TELEMETRY,
    "SM_MODEL_DIR": "SERVING_MODEL_STORE names the directory of the model",
    "OPT_OUT_TRACKING": _TELEMETRY,
    "ENGINE_CACHE_DIR": "the engines are installed packages",
    "DJL_OFFLINE": "HF_HUB_OFFLINE=1 keeps models of the Hugging Face Hub from being downloaded",
    "DJL_VENV_DIR": "virtual environments are in download_dir (SERVING_DOWNLOAD_DIR)",
    "DJL_TEST_S3_NO_CREDENTIALS": "S3 is read with the credentials of the machine",
    "MAX_NETTY_BUFFER_SIZE": _NO_LIMIT,
    "NO_OMP_NUM_THREADS": "OMP_NUM_THREADS is only set for models with several ranks",
    "DJL_LEADER_ADDR": _ONE_MACHINE,
    "DJL_WORKER_ADDR_FORMAT": _ONE_MACHINE,
}
# Read in other places than as a key: the kind of model, its contents, and the limits of its workers.
_ELSEWHERE = (
    *("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_PROGRAM", "SAGEMAKER_REGION", "SAGEMAKER_SAFE_PORT_RANGE"),
    *("SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"),
)
_KNOWN = (*_ELSEWHERE, *env.VARIABLES["SageMaker"], *env.SAGEMAKER_SETTINGS)
_SCRIPTS = ("SAGEMAKER_SUBMIT_DIRECTORY", ("/opt/ml/model", "/opt/ml/model/code"))


def idle_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of SageMaker or LMI that is set and has no effect."""
    for name, value in sorted(environment.items()):
        if not value.strip() or name in _KNOWN:
            continue
        if reason := _reason(name, value.strip()):
            yield f"variable {name} has no effect in this version: {reason}"
        elif name.startswith("SAGEMAKER_") and name != _SCRIPTS[0]:
            near = nearest_key(name, _KNOWN)
            yield f"variable {name} is unknown, it is ignored{f'; did you mean {near}?' if near else ''}"


def _reason(name: str, value: str) -> str | None:
    """Return why a variable has no effect; None if it is unknown, or has its only possible effect."""
    if name == "DJL_CLUSTER_SIZE":
        return None if value == "1" else _ONE_MACHINE
    if name in env.JVM_FLAGS:
        return None if env.asks_for_logs(value) else _NO_JVM
    if name == _SCRIPTS[0] and value.removeprefix("file://").rstrip("/") not in _SCRIPTS[1]:
        return "the script of a model is looked for in its directory, and in code/ below that"
    return _WITHOUT_EFFECT.get(name)
