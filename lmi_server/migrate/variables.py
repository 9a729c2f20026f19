"""Environment variables of a container; the ones that this server knows become the keys that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import SECRETS, is_secret
from lmi_server.machine import environment as env
from lmi_server.migrate.migration import Migration, holds_secret

_MAX_VARIABLES = 1000  # each text of the report is searched for each secret
_OF_ENGINE = re.compile(r"(VLLM|SGLANG|NCCL|OMP|TORCH|PYTORCH|CUDA_LAUNCH|GLOO)_\w+", re.ASCII)
_DEVICES = re.compile(r"(CUDA|NVIDIA|HIP)_VISIBLE_DEVICES")


def carry_variables(migration: Migration, variables: Mapping[str, str]) -> None:
    """Carry over what the variables mean; of a secret one only the name is noted."""
    hide_secrets(variables)
    known = {name: value for name, value in variables.items() if not is_secret(name)}
    found = [
        *env.model_variables(known),
        *env.hugging_face_variables(known),
        *env.text_generation_inference_variables(known),
        *env.default_variables(known),
        *env.sagemaker_overrides(known),
    ]
    for variable in found:
        if variable.key not in migration.values:
            _carry(migration, variable)
    settings = env.server_variables(known)
    for setting in settings:
        migration.differ(
            setting.name, f"a setting of the server: leave it a variable, or {setting.key} in config.properties"
        )
    done = {variable.name for variable in (*found, *settings)}
    _carry_others(migration, {name: value for name, value in variables.items() if name not in done})


def hide_secrets(variables: Mapping[str, str]) -> None:
    """Have reports hide the values of secret variables from now on. Raises ConfigurationError if they are too many."""
    if len(variables) > _MAX_VARIABLES:
        raise ConfigurationError(f"there are {len(variables)} variables; at most {_MAX_VARIABLES} are read")
    SECRETS.add_named(variables)


def _carry(migration: Migration, variable: env.Variable) -> None:
    if variable.key == "option.model_id":
        migration.carry_model(variable.name, variable.value)
    else:
        migration.carry(variable.name, variable.key, variable.value)


def _carry_others(migration: Migration, variables: Mapping[str, str]) -> None:
    for_workers: list[str] = []
    for name, value in variables.items():
        if is_secret(name) or holds_secret(value):
            migration.differ(name, "a secret: give it to the server as a variable; it is not written")
        elif _DEVICES.fullmatch(name):
            migration.differ(name, "the server's own variable; load_on_devices chooses devices for one model")
        elif _OF_ENGINE.fullmatch(name) and "," not in value and "$" not in value:
            for_workers.append(f"{name}={value}")
        else:
            migration.drop(name, "no key stands for it; set it for the server if it needs it")
    if for_workers:
        migration.carry("variables of the engine", "option.env", ",".join(for_workers))
