"""Application files of Ray Serve LLM: Ray Serve's config file with `build_openai_app`, or the arguments of that alone.

Each of their models is named FILE#MODEL_ID; the rest of the file says how Ray's own servers would run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lmi_server.configuration.declaration import Allowed, NoEffect, Unavailable
from lmi_server.configuration.model_file.checking import validate, without_effect
from lmi_server.configuration.model_file.positions import KeyPath, YamlDocument, read_document
from lmi_server.configuration.model_file.serve_sections import Anything, Section
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt

MEMBER = "#"
"""Stands between an application file and the name of one of its models."""

_BUILDERS = ("ray.serve.llm:build_openai_app", "ray.serve.llm.build_openai_app")
_BY_SERVER = NoEffect("the server has front ends of its own; --host and --port say where they listen")
_BY_MODEL = NoEffect("each model is a deployment of its own; its deployment_config says how it runs")


class ServingArguments(Section):
    """The arguments of `build_openai_app`."""

    llm_configs: Annotated[list[Any], Allowed("a list of LLMConfigs, or of paths of their files")] = Field(
        description="The models."
    )
    ingress_cls_config: Annotated[Anything, _BY_SERVER] = Field({}, description="Class of Ray's own front end.")
    ingress_deployment_config: Annotated[Anything, _BY_SERVER] = Field({}, description="Its options.")


class ApplicationSection(Section):
    """One application."""

    name: str | None = Field(None, description="Name of the application.")
    import_path: Annotated[
        str, Unavailable(lambda path: path not in _BUILDERS, f"the models of {_BUILDERS[0]} alone are served")
    ] = Field(description="What builds the application.")
    route_prefix: Annotated[
        str | None, Unavailable(lambda prefix: prefix != "/", "remove the key: the paths have no prefix")
    ] = Field(None, description="What paths begin with.")
    args: ServingArguments = Field(description="The arguments of build_openai_app.")
    runtime_env: Anything = Field({}, description="Ray's runtime environment of every model.")
    deployments: Annotated[list[Anything], _BY_MODEL] = Field([], description="Options of deployments.")
    autoscaling_policy: Annotated[Anything, _BY_MODEL] = Field({}, description="Policy of all deployments together.")
    logging_config: Annotated[Anything, _BY_MODEL] = Field({}, description="Ray Serve's logging_config.")
    external_scaler_enabled: Annotated[bool, _BY_MODEL] = Field(False, description="Whether something else scales.")


class ApplicationFile(Section):
    """Ray Serve's config file."""

    applications: Annotated[list[Anything], Allowed("a list of applications")] = Field(description="The applications.")
    proxy_location: Annotated[str | None, _BY_SERVER] = Field(None, description="Where Ray's proxies run.")
    http_options: Annotated[Anything, _BY_SERVER] = Field({}, description="Where Ray's proxies listen.")
    grpc_options: Annotated[Anything, _BY_SERVER] = Field({}, description="Where Ray's proxies listen for gRPC.")
    logging_config: Annotated[Anything, _BY_SERVER] = Field({}, description="Ray Serve's logging_config.")
    target_capacity: Annotated[float | int | None, _BY_MODEL] = Field(None, description="Share of the replicas.")


def is_application(document: YamlDocument) -> bool:
    return isinstance(document.data, dict) and not document.data.keys().isdisjoint(("applications", "llm_configs"))


def models_of(file: Path) -> list[str]:
    """Return what a file names as models: FILE#MODEL_ID for each of an application, and FILE for any other file.

    Raises ConfigurationError if it is an application file that cannot be served.
    """
    try:
        document = read_document(file)
    except ConfigurationError:
        return [str(file)]  # its reader says what is wrong with it
    if not is_application(document):
        return [str(file)]
    urls = [each.url for each in _members(document, str(file))]
    twice = next((url for url, count in Counter(urls).items() if count > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{document.file}: two of its models are {excerpt(twice, 500)}; rename one")
    return urls


def member_names(document: YamlDocument) -> list[str]:
    """Return the names of the models that an application file holds itself. Raises ConfigurationError if wrong."""
    return [each.name for each in _members(document, document.file) if each.name is not None]


def member(document: YamlDocument, name: str | None) -> tuple[YamlDocument, tuple[str, ...]]:
    """Return the LLMConfig of the model `name` in an application file, or that of its only one, and warnings.

    Raises ConfigurationError if there is no such model.
    """
    found = {each.name: each for each in _members(document, document.file) if each.name is not None}
    chosen = next(iter(found.values()), None) if name is None and len(found) == 1 else found.get(name or "")
    if chosen is None:
        names = excerpt(", ".join(found), 500)
        raise ConfigurationError(f"{document.file}: name one of its models, as {document.file}{MEMBER}NAME: {names}")
    return _with_environment(document.within(chosen.path), chosen.environment), chosen.warnings


@dataclass(frozen=True, slots=True)
class _Member:
    """One entry of llm_configs: an LLMConfig with its name, or the URL of a file."""

    url: str
    name: str | None
    path: KeyPath
    environment: Mapping[str, Any]
    warnings: tuple[str, ...]


def _members(document: YamlDocument, file: str) -> Iterator[_Member]:
    for arguments, path, environment, warnings in _arguments(document):
        for index, entry in enumerate(arguments.llm_configs):
            here = (*path, "llm_configs", index)
            name = None if isinstance(entry, str) else _name(entry, document.place(here))
            url = str(Path(document.file).parent / entry) if name is None else f"{file}{MEMBER}{name}"
            yield _Member(url, name, here, environment, warnings)


def _arguments(
    document: YamlDocument,
) -> Iterator[tuple[ServingArguments, KeyPath, Mapping[str, Any], tuple[str, ...]]]:
    """Yield the arguments of each application, where they are, its runtime environment, and warnings."""
    if "applications" not in document.data:
        alone, checked = validate(document, ServingArguments)
        yield alone, (), {}, tuple(without_effect(checked, alone))
        return
    file, checked = validate(document, ApplicationFile)
    of_file = tuple(without_effect(checked, file))
    for index in range(len(file.applications)):
        section, checked = validate(document.within(("applications", index)), ApplicationSection)
        warnings = (*of_file, *without_effect(checked, section))
        yield section.args, ("applications", index, "args"), section.runtime_env, warnings


def _name(config: Any, place: str) -> str:
    loading = config.get("model_loading_config") if isinstance(config, dict) else None
    name = loading.get("model_id") if isinstance(loading, dict) else None
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{place}: is no LLMConfig and no path of one; it needs model_loading_config with model_id"
        )
    return name


def _with_environment(config: YamlDocument, environment: Mapping[str, Any]) -> YamlDocument:
    """Return an LLMConfig with the runtime environment of its application below its own, as Ray merges the two."""
    own = config.data.get("runtime_env") or {}
    if not environment or not isinstance(own, dict):
        return config
    merged = {**environment, **own}
    both = [each["env_vars"] for each in (environment, own) if isinstance(each.get("env_vars"), dict)]
    merged |= {"env_vars": {name: text for part in both for name, text in part.items()}} if both else {}
    return replace(config, data={**config.data, "runtime_env": merged})
