"""Turns a model directory into a `ResolvedModel`: reads the layers, merges them, checks the values.

Every value keeps its source, so that messages and `lmi-server explain` can name it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmi_server.artifacts.location import MODEL_FORMS, how_to_write
from lmi_server.configuration.checks.model_checks import ModelChecks, declared_options
from lmi_server.configuration.checks.secure_mode import secure_mode, secure_mode_warnings
from lmi_server.configuration.choice.deciding_keys import MODEL_ID, DecidingKeys
from lmi_server.configuration.choice.handler_choice import choose_handler
from lmi_server.configuration.choice.model_layers import SERVING_PROPERTIES, merge_layers, read_layers
from lmi_server.configuration.declaration import Option, written
from lmi_server.configuration.engine import EngineDescription, describe_engine
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, HandlerTable, load_options_type
from lmi_server.configuration.layers import Given, SortedKeys, Source, build
from lmi_server.configuration.model_directory.checkpoint import CheckpointFacts, locate_model, read_config
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt, one_line
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.machine.inventory import Machine, this_machine

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """One model, ready to be served.

    `model_dir` is absolute. `sources` maps each key in full ("option.dtype"), unknown keys included, to the source of
    its value. `worker_environment` holds the variables that the options set in workers.
    """

    name: str
    model_dir: str
    spec: HandlerSpec
    options: ModelOptions
    serving: ServingOptions
    sources: Mapping[str, Source]
    warnings: tuple[str, ...] = ()
    worker_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def handler(self) -> str:
        """Return the class of the handler, "module:Class"."""
        assert self.spec.handler is not None, "a model without a handler is not resolved"
        return self.spec.handler

    @property
    def engine(self) -> EngineDescription[ModelOptions]:
        """Return what the server may ask about the engine."""
        return describe_engine(self.spec, self.options)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return every name under which requests may ask for the model, its own first."""
        return tuple(dict.fromkeys((self.name, *self.options.served_model_name)))

    @property
    def has_sessions(self) -> bool:
        """Whether answers may open sessions: the options ask for them, or the user's own code may."""
        return self.options.has_sessions or self.spec.runs_user_code or Path(self.model_dir, "model.py").is_file()


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known about a model directory, whether this version can serve its model or not.

    - `problems`: a line for each wrong value. `options` and `serving` hold the default in its place.
    - `unavailable`: a line for each valid value that this version cannot serve.
    - `handler_reason`: what chose the handler, as a text.
    - `sources`: the source of each declared key, by key in full; `unknown`: the same for undeclared keys.
    - `location`: a directory, a Hugging Face id or an s3:// address.
    - `config`: the model's config.json, empty if it is not on this machine.
    - `worker_environment`: the variables that the options set in workers, with their final values.
    """

    name: str
    model_dir: str
    spec: HandlerSpec
    handler_reason: str
    options: ModelOptions
    serving: ServingOptions
    sources: Given
    unknown: Given
    location: str
    config: Mapping[str, Any]
    machine: Machine
    worker_environment: Mapping[str, str]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    unavailable: tuple[str, ...]

    @property
    def engine(self) -> EngineDescription[ModelOptions]:
        """Return what the server may ask about the engine."""
        return describe_engine(self.spec, self.options)

    def resolved(self) -> ResolvedModel:
        """Return the model, ready to be served. Raises ConfigurationError with all problems, one per line."""
        if self.problems or self.unavailable or self.spec.handler is None:
            raise ConfigurationError.from_problems((*self.problems, *self.unavailable))
        return ResolvedModel(
            name=self.name,
            model_dir=self.model_dir,
            spec=self.spec,
            options=self.options,
            serving=self.serving,
            sources=MappingProxyType({**self.sources, **self.unknown}),
            warnings=self.warnings,
            worker_environment=self.worker_environment,
        )


def resolve_model(
    directory: Path, environment: Mapping[str, str], registration: Mapping[str, str] = _NOTHING
) -> ResolvedModel:
    """Resolve the model in `directory`.

    `registration` holds the values of the registration call, by key in full. Raises ConfigurationError with all
    problems, one per line.
    """
    return inspect_model(directory, environment, registration).resolved()


def inspect_model(
    directory: Path,
    environment: Mapping[str, str],
    registration: Mapping[str, str] = _NOTHING,
    machine: Machine | None = None,
    handlers: HandlerTable = HANDLERS,
    text: str | None = None,
) -> Inspection:
    """Read and check the configuration of the model in `directory` for `machine` (None: this one).

    `registration` holds the values of the registration call, by key in full. `text` stands for the content of
    serving.properties, or of the model file in its place, which need not be saved yet. Raises ConfigurationError only
    if a file or SageMaker's variables of secure mode cannot be read.
    """
    model_dir = _checked_directory(directory)
    secure = secure_mode(environment)
    machine = machine or this_machine(environment, handlers.engines())
    layers = read_layers(model_dir, environment, registration, text)
    keys = layers.deciding_keys()
    location, misplaced = _locate(keys, model_dir)
    checkpoint = CheckpointFacts(model_dir, layers.has_config, location, read_config(location))
    choice = choose_handler(keys, checkpoint, machine, handlers)
    spec = choice.spec or handlers.default
    declared = declared_options(spec)
    merged = merge_layers(layers, spec, declared, checkpoint.task, machine)
    serving, wrong_serving = build(ServingOptions, merged.known)
    options, wrong_options = build(load_options_type(spec), merged.known)
    options = _complete(options, spec, location, merged)
    variables = describe_engine(spec, options).worker_environment()
    checks = ModelChecks(checkpoint, misplaced, choice, spec, handlers, merged, serving, options, machine)
    everything = {**merged.known, **merged.unknown}
    SECRETS.add_named({source.spelling or key: source.raw for key, source in everything.items()})
    forbidden = () if secure is None else secure.problems(everything, options.adapters, model_dir, location)
    return Inspection(
        name=model_name(model_dir),
        model_dir=str(model_dir),
        spec=spec,
        handler_reason=choice.reason,
        options=options,
        serving=serving,
        sources=MappingProxyType({**_default_sources(declared), **merged.known}),
        unknown=MappingProxyType(merged.unknown),
        location=location,
        config=checkpoint.config,
        machine=machine,
        worker_environment=MappingProxyType(
            {name: environment.get(name, value) for name, value in variables.items()} | dict(options.variables)
        ),
        warnings=_lines(secure_mode_warnings(environment), layers.warnings, checks.warnings()),
        problems=_lines(checks.problems({**wrong_serving, **wrong_options}), forbidden),
        unavailable=_lines(checks.unavailable()),
    )


def _lines(*texts: Iterable[str]) -> tuple[str, ...]:
    """Return each text as one line, whatever a key, a value or a path in it holds."""
    return tuple(map(one_line, chain.from_iterable(texts)))


def _complete(options: ModelOptions, spec: HandlerSpec, location: str, merged: SortedKeys) -> ModelOptions:
    """Return the options with the model's location, and with the texts that the engine or the user's code reads.

    The user's code also reads the keys of the model server, as it does under LMI.
    """
    # If a key is given with and without "option.", the former wins; a declared key wins over both.
    bare = {key: source.raw for key, source in merged.unknown.items() if not key.startswith("option.")}
    prefixed = {key.removeprefix("option."): merged.unknown[key].raw for key in merged.unknown if key not in bare}
    written = {**bare, **prefixed}
    if spec.runs_user_code:
        decided = {
            key.removeprefix("option."): source.raw for key, source in merged.known.items() if _is_told(key, source)
        }
        written |= {**decided, "model_id": location}
    return options.model_copy(update={"model_id": location}).passing_through(written)


def _is_told(key: str, source: Source) -> bool:
    """Return whether the user's code gets a value: no advice about the model server, and as in LMI no option.env.

    The variables of option.env may be secret.
    """
    return key != "option.env" and (key.startswith("option.") or source.layer != "recommender")


def model_name(model_dir: Path) -> str:
    """Return the name that LMI gives a directory: its own, with _ for all but ASCII letters, digits and _."""
    return re.sub(r"\W", "_", model_dir.name, flags=re.ASCII) or "model"


def _checked_directory(directory: Path) -> Path:
    model_dir = Path(os.path.abspath(directory))
    if _has_line_end(str(model_dir)):  # every message names it, and would look like several
        raise ConfigurationError(
            f'model directory "{excerpt(str(model_dir), 200)}" has a line end in its name; rename it'
        )
    if not model_dir.exists():
        raise ConfigurationError(
            f"{model_dir}: there is no such directory; a model is {MODEL_FORMS}{how_to_write(model_dir)}"
        )
    if not model_dir.is_dir():
        raise ConfigurationError(f"{model_dir}: is a file; name the directory that holds {SERVING_PROPERTIES}")
    return model_dir


def _locate(keys: DecidingKeys, model_dir: Path) -> tuple[str, str | None]:
    """Return the location of the model, and a problem if option.model_id, or a name of a file, is not allowed."""
    try:
        location = locate_model(keys.model_id, model_dir)
        if _has_line_end(location):  # as of the model directory
            raise ValueError(f'is not allowed; there is a line end in "{excerpt(Path(location).name)}"; rename it')
        return location, None
    except ValueError as error:
        source = keys.source(MODEL_ID)
        named = f"{model_dir}: its file in GGUF" if source is None else source.describe(MODEL_ID)
        return str(model_dir), f"{named} {error}"


def _has_line_end(text: str) -> bool:
    return text.splitlines() != [text]


def _default_sources(declared: Sequence[Option]) -> Given:
    return {option.key: Source("default", written(option.default)) for option in declared}
