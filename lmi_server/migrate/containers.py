"""Command lines, docker compose's files and KServe's InferenceServices: a container, its variables and its command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.secrets import is_secret
from lmi_server.migrate.command_line import Command, check_count, module_of, mount, read_command, split_commands
from lmi_server.migrate.engines import carry_options, engine_of_image, engine_of_program, vllm
from lmi_server.migrate.migration import Migration
from lmi_server.migrate.variables import carry_variables, hide_secrets

_LMI_IMAGE = re.compile(r"(?i)djl|lmi")
_FOR_CONTAINER = "a matter of the container, and the same for an image of this server: docs/container.md"
_FOR_KUBERNETES = "a matter of Kubernetes: deploy/kserve has an InferenceService of this server"
_FORMATS = {"sklearn": "djl_python.sklearn", "xgboost": "djl_python.xgboost"}
_STORAGE = re.compile(r"(?:s3|gs)://")


def from_command(text: str) -> Migration:
    """Return the migration of a command line, or of a script with one. Raises ConfigurationError if it has none."""
    commands = [_read(words) for words in split_commands(text)]
    found = [command for command in commands if _is_known(command)]
    if not found:
        raise ConfigurationError(
            "no command line of vLLM, SGLang or text-generation-inference was found; write it in quotes"
        )
    for command in commands[: commands.index(found[0])]:
        if not command.words and not command.image:  # export NAME=VALUE in a line of its own
            found[0].variables = command.variables | found[0].variables
    migration = _from_container(found[0])
    _drop_others(migration, (command.words for command in commands if command is not found[0] and command.words))
    return migration


def _drop_others(migration: Migration, commands: Iterable[Sequence[str]]) -> None:
    for words in commands:
        migration.drop(" ".join(_without_secrets(words[:6])), "another command; it is not run")


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with *** for the values of options whose names mean secrets."""
    for before, word in zip(("", *words), words, strict=False):
        name, equals, _ = word.partition("=")
        if equals and _is_secret_option(name):
            yield f"{name}=***"
        else:
            yield "***" if _is_secret_option(before) else word


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and is_secret(word.lstrip("-").replace("-", "_"))


def from_words(words: Sequence[str]) -> Migration:
    """Return the migration of a command whose words the caller's shell has taken apart."""
    command = _read(check_count(list(words)))
    if not _is_known(command):
        raise ConfigurationError(f"{words[0]} starts neither vLLM, SGLang nor text-generation-inference")
    return _from_container(command)


def _read(words: Sequence[str]) -> Command:
    return read_command(words, lambda program: engine_of_program(program) is not None)


def _is_known(command: Command) -> bool:
    program, _ = module_of(command.words)
    known = engine_of_program(program) or engine_of_image(command.image)
    return known is not None or _LMI_IMAGE.search(command.image) is not None


def _from_container(command: Command) -> Migration:
    hide_secrets(command.variables)
    program, arguments = module_of(command.words)
    engine = engine_of_program(program)
    if engine is None:
        engine, arguments = engine_of_image(command.image), command.words
    title = "LMI" if engine is None else engine.title
    migration = Migration(f"a command line of {title}", mounts=command.mounts)
    for name, secret in _named_secrets(command.words):
        hide_secrets({name: secret})
    if engine is not None:
        carry_options(migration, engine, arguments)
    # MODEL_ID is text-generation-inference's; this server does not read it.
    carry_variables(migration, {name: value for name, value in command.variables.items() if name != "MODEL_ID"})
    if "MODEL_ID" in command.variables and "option.model_id" not in migration.values:
        migration.carry_model("MODEL_ID", command.variables["MODEL_ID"])
    for option in command.options:
        migration.drop(option, _FOR_CONTAINER)
    _drop_others(migration, command.others)
    for port in command.ports:
        migration.differ(f"port {port}", "the server listens on 8080: lmi-server serve --port")
    return migration


def _named_secrets(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values of options whose names mean secrets, for the report to hide."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        if word.startswith("-"):
            yield name, value if equals else following


def from_compose(data: Mapping[str, Any], service: str | None) -> Migration:
    """Return the migration of one service of a compose file. Raises ConfigurationError if it is not clear which."""
    found = data.get("services")
    services = (
        {str(name): each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}
    )
    commands = {name: _command_of_service(each) for name, each in services.items()}
    known = [name for name, command in commands.items() if _is_known(command)]
    if service is None and len(known) > 1:
        raise ConfigurationError(f"several services serve models; name one by --service: {', '.join(known[:20])}")
    name = service or next(iter(known), None)
    if name is None or name not in known:
        raise ConfigurationError(f"no service {name or ''} of vLLM, SGLang or text-generation-inference was found")
    migration = _from_container(commands[name])
    migration.source = f"the service {name} of a compose file, {migration.source.removeprefix('a command line of ')}"
    for key in services[name]:
        if key not in ("image", "command", "entrypoint", "environment", "volumes", "ports"):
            migration.drop(f"{key} of {name}", _FOR_CONTAINER)
    for other in services:
        if other != name:
            migration.drop(f"the service {other}", "another service")
    return migration


def _command_of_service(service: Mapping[str, Any]) -> Command:
    words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
    command = _read(words)
    command.image = str(service.get("image") or "")
    command.variables |= _variables(service.get("environment"))
    volumes = service.get("volumes")
    for each in volumes if isinstance(volumes, list) else ():
        if isinstance(each, str):
            command.mounts |= mount(each)
    ports = service.get("ports")
    command.ports = [str(each) for each in ports] if isinstance(ports, list) else []
    return command


def _words(command: Any) -> list[str]:
    """Return a command that is a text or a list; $$ is compose's $."""
    if isinstance(command, list):
        return check_count([str(word).replace("$$", "$") for word in command])
    return next(iter(split_commands(str(command))), []) if command else []


def _variables(environment: Any) -> dict[str, str]:
    """Return the variables of a mapping, of a list of NAME=VALUE, or of Kubernetes' list of names and values."""
    if isinstance(environment, dict):
        return {str(name): "" if value is None else str(value) for name, value in environment.items()}
    found: dict[str, str] = {}
    for each in environment if isinstance(environment, list) else ():
        if isinstance(each, dict):
            found[str(each.get("name"))] = str(each.get("value") or "")
        else:
            name, _, value = str(each).partition("=")
            found[name] = value
    return found


def from_kserve(data: Mapping[str, Any]) -> Migration:
    """Return the migration of an InferenceService. Raises ConfigurationError if it has no predictor."""
    spec = data.get("spec")
    predictor = spec.get("predictor") if isinstance(spec, dict) else None
    if not isinstance(predictor, dict):
        raise ConfigurationError("the InferenceService has no spec.predictor")
    containers = predictor.get("containers")
    if isinstance(containers, list) and containers and isinstance(containers[0], dict):
        migration, used = _from_kubernetes(containers[0]), {"containers"}
    else:
        format_name, model = _model_of(predictor)
        migration, used = _from_model(format_name, model), {"model", format_name}
    migration.source = "an InferenceService of KServe"
    for key in predictor:
        if key not in used:
            migration.drop(f"predictor.{key}", _FOR_KUBERNETES)
    for key in spec if isinstance(spec, dict) else ():
        if key != "predictor":
            migration.drop(f"spec.{key}", "requests go to the model as they are")
    return migration


def _from_kubernetes(container: Mapping[str, Any]) -> Migration:
    command = _read([*_words(container.get("command")), *_words(container.get("args"))])
    command.image = str(container.get("image") or "")
    command.variables |= _variables(container.get("env"))
    if not _is_known(command):
        raise ConfigurationError(f"the container's image {command.image[:200]} is no server that is known here")
    return _from_container(command)


def _from_model(format_name: str, model: Mapping[str, Any]) -> Migration:
    migration = Migration("")
    variables = _variables(model.get("env"))
    hide_secrets(variables)
    if format_name in _FORMATS:
        migration.carry(f"modelFormat {format_name}", "option.entryPoint", _FORMATS[format_name])
    elif _HUGGING_FACE.fullmatch(format_name):
        arguments = _words(model.get("args"))
        for name, secret in _named_secrets(arguments):
            hide_secrets({name: secret})
        carry_options(migration, vllm(), [_rename(word) for word in arguments])
    else:
        migration.drop(
            f"modelFormat {format_name}", "no handler serves this format; write a model.py, docs/own-code.md"
        )
    _carry_storage(migration, str(model.get("storageUri") or ""))
    carry_variables(migration, variables)
    for key in model:
        if key not in ("modelFormat", "args", "env", "storageUri", "name"):
            migration.drop(f"model.{key}", _FOR_KUBERNETES)
    return migration


_HUGGING_FACE = re.compile(r"huggingface|vLLM", re.IGNORECASE)
_OWN_FLAGS = {"--model_id": "--model", "--model_dir": "--model", "--model_name": "--served-model-name"}


def _rename(word: str) -> str:
    """Return a word of the arguments of KServe's server, which gives some of vLLM's options other names."""
    name, equals, value = word.partition("=")
    return f"{_OWN_FLAGS.get(name, name)}{equals}{value}"


def _model_of(predictor: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the format and the section of a predictor's model, in today's form or in the older one."""
    model = predictor.get("model")
    if isinstance(model, dict):
        form = model.get("modelFormat")
        return str(form.get("name") if isinstance(form, dict) else ""), model
    for name, section in predictor.items():
        if isinstance(section, dict) and ("storageUri" in section or "args" in section):
            return str(name), section
    raise ConfigurationError("the predictor has neither a model nor a container")


def _carry_storage(migration: Migration, uri: str) -> None:
    if not uri:
        return
    if _STORAGE.match(uri):
        migration.carry_model("storageUri", uri)
    elif uri.startswith("hf://"):
        migration.carry_model("storageUri", uri.removeprefix("hf://"))
    else:
        migration.drop(f"storageUri {uri}", "mount it, and name its directory in option.model_id")
