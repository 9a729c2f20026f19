"""The schemas of the three files: serving.properties, config.properties, and a model file of Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from lmi_server.configuration.choice.deciding_keys import MODEL_ID
from lmi_server.configuration.choice.model_layers import OLD_MODEL_ID
from lmi_server.configuration.declaration import Option
from lmi_server.configuration.engine import load_engine_type
from lmi_server.configuration.handlers import HANDLERS, load_options_type
from lmi_server.configuration.model_file.application import ApplicationFile, ApplicationSection, ServingArguments
from lmi_server.configuration.model_file.llm_config import LlmConfigFile
from lmi_server.configuration.model_file.rayllm import RayLlmFile
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.server_settings import ADDRESSES, MODEL_DEFAULTS, WITHOUT_EFFECT, ServerSettings
from lmi_server.schema.values import Schema, annotations_of, value_schema

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT: Schema = {"type": ["string", "number", "boolean"]}
_DEFINITIONS = "#/$defs/"


def serving_properties(strict: bool = False) -> Schema:
    """Return the schema of serving.properties as one flat object.

    Other keys are allowed, as they are in a file: an engine or a model.py may read them. If `strict`, none but those
    that an engine installed here declares.
    """
    specs = (*HANDLERS.specs, HANDLERS.java)
    shared = [*ServingOptions.declared_options(), *ModelOptions.declared_options()]
    everything = [*shared, *(option for spec in specs for option in load_options_type(spec).declared_options())]
    properties = _flat(everything)
    properties[OLD_MODEL_ID] = {**properties[MODEL_ID], "description": f"LMI's old name of {MODEL_ID}."}
    owners = _owners()
    for key in owners.keys() - {key for option in shared for key in option.keys}:
        properties[key]["x-handlers"] = owners[key]
    if strict:
        engine = sorted(
            {f"option.{name}" for spec in specs for name in load_engine_type(spec).argument_names()} - properties.keys()
        )
        properties |= {key: {**_TEXT, "description": "An argument of the engine."} for key in engine}
    return _document("serving.properties", properties, strict)


def config_properties(strict: bool = False) -> Schema:
    """Return the schema of config.properties as one flat object."""
    defaults = [option for option in ServingOptions.declared_options() if option.key in MODEL_DEFAULTS]
    properties = _flat([*ServerSettings.declared_options(), *defaults])
    address = {
        "type": "string",
        "description": "Address to listen on: http://host:port, https://host:port, unix:/path.",
    }
    properties |= dict.fromkeys(ADDRESSES, address)
    for key, reason in WITHOUT_EFFECT.items():
        properties[key] = {**_TEXT, "description": f"No effect: {reason}.", "deprecated": True}
    return _document("config.properties", properties, strict)


def model_file(strict: bool = False) -> Schema:
    """Return the schema of a model file in YAML: RayLLM's, an LLMConfig, or an application of Ray Serve LLM."""
    del strict  # its sections refuse unknown keys anyway
    kinds = (RayLlmFile, LlmConfigFile, ApplicationFile, ApplicationSection, ServingArguments)
    _, schema = models_json_schema([(kind, "validation") for kind in kinds])
    definitions: dict[str, Schema] = schema["$defs"]
    # What the reader takes apart itself is declared as a free mapping.
    definitions["ServingArguments"]["properties"]["llm_configs"]["items"] = {
        "anyOf": [{"$ref": f"{_DEFINITIONS}LlmConfigFile"}, {"type": "string"}]
    }
    definitions["ApplicationFile"]["properties"]["applications"]["items"] = {
        "$ref": f"{_DEFINITIONS}ApplicationSection"
    }
    for definition in definitions.values():
        _complete(definition)
    tops = ("RayLlmFile", "LlmConfigFile", "ApplicationFile", "ServingArguments")
    return {
        "$schema": _DIALECT,
        "title": "Model file of Ray",
        "anyOf": [{"$ref": f"{_DEFINITIONS}{name}"} for name in tops],
        "$defs": definitions,
    }


def _document(title: str, properties: Mapping[str, Schema], strict: bool) -> Schema:
    return {
        "$schema": _DIALECT,
        "title": title,
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False if strict else _TEXT,
    }


def _flat(options: Iterable[Option]) -> dict[str, Schema]:
    """Return the schema of each spelling of each option; several declarations of a key allow what any of them does."""
    values: dict[str, list[Schema]] = {}
    first: dict[str, tuple[Option, str]] = {}
    for option in options:
        value = value_schema(option)
        for key in option.keys:
            first.setdefault(key, (option, option.key))
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: _property(key, *first[key], values[key]) for key in first}


def _property(key: str, option: Option, own_key: str, values: list[Schema]) -> Schema:
    notes = annotations_of(option)
    if key != own_key:
        notes["description"] = f"The same as {own_key}. {notes['description']}"
    return notes | (values[0] if len(values) == 1 else {"anyOf": values})


def _owners() -> Mapping[str, list[str]]:
    """Return the handlers that declare each key."""
    owners: dict[str, list[str]] = {}
    for spec in (*HANDLERS.specs, HANDLERS.java):
        for option in load_options_type(spec).declared_options():
            for key in option.keys:
                owners.setdefault(key, []).append(spec.title)
    return owners


def _complete(definition: Schema) -> None:
    """Allow what the reader of a model file allows beside pydantic: former names of keys, and null for no value."""
    properties: dict[str, Schema] = definition.get("properties", {})
    for name, value in list(properties.items()):
        former: Any = value.pop("formerly", [])
        notes = {key: value.pop(key) for key in ("description", "title", "default") if key in value}
        optional = notes | {"anyOf": [value, {"type": "null"}]}
        properties[name] = optional
        for old in former:
            properties[old] = {**optional, "description": f"The former name of {name}.", "deprecated": True}
