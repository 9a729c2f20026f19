"""Turns a model directory into a `ResolvedModel`: reads the layers, merges them, checks the values.

Every value keeps its source, so that messages and `lmi-server explain` can name it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmi_server.configuration.check import (
    build,
    combination_warnings,
    conflicts,
    describe_source,
    unavailable,
    undefined_formatters,
    value_warnings,
)
from lmi_server.configuration.checkpoint import architectures, is_causal_lm, locate_model, read_config
from lmi_server.configuration.declaration import Option, written
from lmi_server.configuration.handler_choice import Choice, Model, choose_handler
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec, HandlerTable, load_options_type
from lmi_server.configuration.layers import (
    Given,
    SortedKeys,
    Source,
    nearest_key,
    spellings,
    unknown_key_warning,
)
from lmi_server.configuration.model_layers import SERVING_PROPERTIES, merge_layers, read_layers
from lmi_server.configuration.options import ModelOptions, ServingOptions
from lmi_server.configuration.tasks import infer_task
from lmi_server.contract.errors import ConfigurationError
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
    def served_names(self) -> tuple[str, ...]:
        """Return every name under which requests may ask for the model, its own first."""
        return tuple(dict.fromkeys((self.name, *self.options.served_model_name)))


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known about a model directory, whether this version can serve its model or not.

    - `problems`: a line for each wrong value. `options` and `serving` hold the default in its place.
    - `unavailable`: a line for each valid value that this version cannot serve.
    - `sources`: the source of each declared key, by key in full; `unknown`: the same for undeclared keys.
    - `location`: a directory, a Hugging Face id or an s3:// address.
    - `config`: the model's config.json, empty if it is not on this machine.
    - `worker_environment`: the variables that the options set in workers, with their final values.
    """

    name: str
    model_dir: str
    spec: HandlerSpec
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

    def resolved(self) -> ResolvedModel:
        """Return the model, ready to be served. Raises ConfigurationError with all problems, one per line."""
        if self.problems or self.unavailable or self.spec.handler is None:
            raise ConfigurationError("\n".join((*self.problems, *self.unavailable)))
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
    directory: Path,
    environment: Mapping[str, str],
    registration: Mapping[str, str] = _NOTHING,
    handlers: HandlerTable = HANDLERS,
) -> ResolvedModel:
    """Resolve the model in `directory`.

    `registration` holds the values of the registration call, by key in full. Raises ConfigurationError with all
    problems, one per line.
    """
    return inspect_model(directory, environment, registration, handlers=handlers).resolved()


def inspect_model(
    directory: Path,
    environment: Mapping[str, str],
    registration: Mapping[str, str] = _NOTHING,
    machine: Machine | None = None,
    handlers: HandlerTable = HANDLERS,
) -> Inspection:
    """Read and check the configuration of the model in `directory` for `machine` (None: this one).

    `registration` holds the values of the registration call, by key in full. Raises ConfigurationError only if a file
    cannot be read.
    """
    model_dir = _checked_directory(directory)
    machine = machine or this_machine(environment, handlers.engines())
    layers = read_layers(model_dir, environment, registration)
    given = layers.as_written()
    location, misplaced = _locate(given, model_dir)
    config = read_config(location)
    names = architectures(config)
    inferred = infer_task(names, location)
    choice = choose_handler(given, Model(model_dir, names, _task(given) or inferred), machine, handlers)
    spec = choice.spec or handlers.default
    options_type = load_options_type(spec)
    declared = (*ServingOptions.declared(), *options_type.declared())
    merged = merge_layers(layers, spec, declared, inferred, machine)
    serving, bad_serving = build(ServingOptions, merged.known)
    options, bad_options = build(options_type, merged.known)
    # In the order of the file: the user mends it from top to bottom.
    bad = dict(sorted({**bad_serving, **bad_options}.items(), key=lambda item: merged.known[item[0]].line or 0))
    wrong = [*merged.problems, *bad.values(), *misplaced, *conflicts(serving, options, merged.known, bad)]
    if choice.problem is not None:
        wrong.append(choice.problem)
    elif not misplaced:
        wrong += _no_checkpoint(spec, location, model_dir)
    if spec.formats_text:
        wrong += undefined_formatters(options, merged.known, model_dir)
    return Inspection(
        name=model_name(model_dir),
        model_dir=str(model_dir),
        spec=spec,
        options=_complete(options, spec, location, merged),
        serving=serving,
        sources=MappingProxyType({**_default_sources(declared), **merged.known}),
        unknown=MappingProxyType(merged.unknown),
        location=location,
        config=config,
        machine=machine,
        worker_environment=MappingProxyType(
            {name: environment.get(name, value) for name, value in options.worker_environment().items()}
        ),
        warnings=(
            *(*layers.warnings, *merged.warnings, *_unknown_key_warnings(merged.unknown, spec, declared, handlers)),
            *(
                *value_warnings(serving, merged.known),
                *value_warnings(options, merged.known),
                *combination_warnings(options, merged.known),
            ),
        ),
        problems=tuple(wrong),
        unavailable=tuple(_unavailable(choice, model_dir, serving, options, merged.known, config, handlers)),
    )


def _complete(options: ModelOptions, spec: HandlerSpec, location: str, merged: SortedKeys) -> ModelOptions:
    """Return the options with the model's location, and with the texts that the engine or the user's code reads.

    The user's code also reads the keys of the model server, as it does under LMI.
    """
    # If a key is given with and without "option.", the former wins; a declared key wins over both.
    bare = {key: source.raw for key, source in merged.unknown.items() if not key.startswith("option.")}
    prefixed = {key.removeprefix("option."): merged.unknown[key].raw for key in merged.unknown if key not in bare}
    written = {**bare, **prefixed}
    if spec.runs_user_code:
        decided = {key.removeprefix("option."): source.raw for key, source in merged.known.items()}
        written |= {**decided, "model_id": location}
    return options.model_copy(update={"model_id": location}).passing_through(written)


def model_name(model_dir: Path) -> str:
    """Return the name that LMI gives a directory: its own, with _ for all but ASCII letters, digits and _."""
    return re.sub(r"\W", "_", model_dir.name, flags=re.ASCII) or "model"


def _checked_directory(directory: Path) -> Path:
    model_dir = Path(os.path.abspath(directory))
    if not model_dir.exists():
        raise ConfigurationError(f"{model_dir}: there is no such directory")
    if not model_dir.is_dir():
        raise ConfigurationError(f"{model_dir}: is a file; name the directory that holds {SERVING_PROPERTIES}")
    return model_dir


def _task(given: Given) -> str | None:
    """Return the task that a layer names; None if no layer does, or if it says auto."""
    source = given.get("option.task")
    return None if source is None or source.raw.lower() == "auto" else source.raw


def _unknown_key_warnings(
    unknown: Given, spec: HandlerSpec, declared: Sequence[Option], handlers: HandlerTable
) -> Iterator[str]:
    of_engine = load_options_type(spec).engine_names()
    known = [*spellings(declared), *(f"option.{name}" for name in sorted(of_engine))]
    for key, source in unknown.items():
        if key.removeprefix("option.") in of_engine:
            continue
        others = _handlers_that_know(key, handlers)
        if spec.runs_user_code:
            if nearest_key(key, known) is not None:  # otherwise it is a key of the user's code, not a misspelling
                yield unknown_key_warning(key, source, known, "it is passed on to the handler")
        elif others:
            yield f"{source.place}: {key} has no effect on {spec.title}; it is an option of {', '.join(others)}"
        else:
            yield unknown_key_warning(key, source, known)


def _handlers_that_know(key: str, handlers: HandlerTable) -> list[str]:
    return [spec.title for spec in handlers.specs if key in spellings(load_options_type(spec).declared())]


def _locate(given: Given, model_dir: Path) -> tuple[str, list[str]]:
    """Return the location of the model, and a problem if option.model_id does not name one."""
    source = given.get("option.model_id")
    try:
        return locate_model(source.raw if source else None, model_dir), []
    except ValueError as error:
        assert source is not None, "without a model_id the model is its directory"
        return str(model_dir), [f"{describe_source(source, 'option.model_id')} {error}"]


def _no_checkpoint(spec: HandlerSpec, location: str, model_dir: Path) -> Iterator[str]:
    if spec.reads_checkpoint and location == str(model_dir) and not (model_dir / "config.json").is_file():
        missing = "holds no config.json, and option.model_id (or HF_MODEL_ID) names no other model"
        if (model_dir / "MAR-INF").is_dir():
            missing = "is an archive of TorchServe (MAR-INF), which is not served; put a model.py beside its files"
        yield f"{model_dir}: {missing}"


def _unavailable(
    choice: Choice,
    model_dir: Path,
    serving: ServingOptions,
    options: ModelOptions,
    sources: Given,
    config: Mapping[str, Any],
    handlers: HandlerTable,
) -> Iterator[str]:
    """Yield a problem for each value that this version cannot serve; if it lacks the handler, only for that."""
    missing = choice.missing(model_dir, handlers)
    if missing is not None:
        yield missing
        return
    yield from unavailable(serving, sources)
    if serving.batch_size > 1 and choice.spec is not None and not choice.spec.takes_batches:
        yield (
            f"{describe_source(sources['batch_size'], 'batch_size')} is not available in this version; "
            "requests are decoded together by the rolling batch; remove the key"
        )
    yield from unavailable(options, sources)
    names = architectures(config)
    if choice.spec is not None and choice.spec.answers_tasks and "option.task" not in sources:
        yield f"{model_dir}: no task follows from architecture {', '.join(names) or 'unknown'}; set option.task"
    if choice.spec is not None and choice.spec.causal_lm_only and names and not is_causal_lm(names):
        rolling = options.rolling_batch
        yield (
            f"{model_dir}: architecture {', '.join(names)} cannot be decoded by option.rolling_batch={rolling}, which "
            "needs a causal language model (*ForCausalLM); set option.task, for example option.task=text-embedding"
        )


def _default_sources(declared: Sequence[Option]) -> Given:
    return {option.key: Source("default", written(option.default)) for option in declared}
