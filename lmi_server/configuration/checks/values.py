"""Checks merged values against their declarations. Each message is one line that names place, key, value and remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from lmi_server.configuration.declaration import (
    Conflict,
    Deprecated,
    DeprecatedValue,
    NoEffect,
    Option,
    Options,
    Unavailable,
)
from lmi_server.configuration.engine import EngineDescription
from lmi_server.configuration.handlers import HandlerSpec
from lmi_server.configuration.layers import DERIVED, Given, Source
from lmi_server.configuration.model_directory.model_code import MODEL_CODE, defines
from lmi_server.configuration.options import FORMATTERS, ModelOptions, ServingOptions
from lmi_server.machine.inventory import Machine


def unavailable(options: Options, sources: Given) -> Iterator[str]:
    """Yield a problem for each documented value that this version cannot serve."""
    for option, source, value in _values_of_user(options, sources):
        for mark in option.marks:
            if isinstance(mark, Unavailable) and mark.applies(value):
                yield f"{source.describe(option.key)} is not available in this version; {mark.instead}"
    for conflict in options.unavailable():
        key = conflict.keys[0]
        yield f"{sources[key].describe(key)} is not available in this version; {conflict.text}"


def conflicts(
    spec: HandlerSpec, serving: ServingOptions, options: ModelOptions, sources: Given, wrong: Collection[str]
) -> Iterator[str]:
    """Yield a problem for each combination of values that is not allowed.

    The keys in `wrong` have no valid value, so a combination with one of them cannot be judged and is skipped.
    """
    given = _keys_of_user(sources)
    for conflict in (*_serving_conflicts(spec, serving, options, given), *options.conflicts(given)):
        if not set(conflict.keys).isdisjoint(wrong):
            continue
        key = next((key for key in conflict.keys if key in sources), conflict.keys[0])
        place = sources[key].describe(key) if key in sources else key
        yield f"{place} is not allowed; allowed: {conflict.text}"


def _serving_conflicts(
    spec: HandlerSpec, serving: ServingOptions, options: ModelOptions, given: Collection[str]
) -> Iterator[Conflict]:
    if serving.min_workers > serving.max_workers:
        keys = ("maxWorkers", "minWorkers")
        here = f"maxWorkers (here {serving.max_workers}) not below minWorkers (here {serving.min_workers})"
        yield Conflict(keys, here)
    one_worker = next((key for key in spec.one_worker_keys if getattr(options, key.removeprefix("option."))), None)
    if one_worker is not None and serving.max_workers > 1:
        yield Conflict(("maxWorkers", one_worker), f"1 with {one_worker}=true")
    if spec.adapters_instead and options.enable_lora:
        yield Conflict(("option.enable_lora",), f"false, because {spec.adapters_instead}")
    if options.has_own_engine and options.enable_venv:
        yield Conflict(
            ("option.enable_venv",),
            "false with an engine of its own, whose environment has none of the server's packages",
        )
    rolling = options.rolling_batch
    if serving.batch_size > 1 and "option.rolling_batch" in given and rolling not in ("disable", "auto"):
        allowed = f"1 with option.rolling_batch={rolling}; a rolling batch needs no dynamic batch"
        yield Conflict(("batch_size",), allowed)
    if serving.batch_size > 1 and options.enable_streaming != "false" and rolling == "disable":
        yield Conflict(("batch_size",), f"1 with option.enable_streaming={options.enable_streaming}")


def undefined_formatters(options: ModelOptions, sources: Given, model_dir: Path) -> Iterator[str]:
    """Yield a problem for each formatter whose function model.py does not define."""
    output = None if options.output_formatter in FORMATTERS else options.output_formatter
    path = model_dir / MODEL_CODE
    for key, name in (("option.input_formatter", options.input_formatter), ("option.output_formatter", output)):
        if name is None or (path.is_file() and defines(path, name)):
            continue
        missing = f"{path} does not define it" if path.is_file() else f"there is no {path} that defines it"
        allowed = next(option.allowed for option in options.declared_options() if option.key == key)
        yield f"{sources[key].describe(key)} is not allowed; {missing}; allowed: {allowed}"


def value_warnings(options: Options, sources: Given) -> Iterator[str]:
    """Yield a warning for each key that is deprecated or has no effect."""
    for option, source, _ in _values_of_user(options, sources):
        for mark in option.marks:
            if isinstance(mark, Deprecated):
                yield f"{source.place}: {option.key} is deprecated: {mark.advice}"
            elif isinstance(mark, DeprecatedValue) and source.raw == mark.value:
                yield f"{source.describe(option.key)} is deprecated: {mark.advice}"
            elif isinstance(mark, NoEffect):
                yield f"{source.place}: {option.key} has no effect here: {mark.reason}"


def combination_warnings(engine: EngineDescription[ModelOptions], sources: Given, machine: Machine) -> Iterator[str]:
    """Yield a warning for each key that has no effect because of the value of another key, or on `machine`."""
    given = _keys_of_user(sources)
    for conflict in engine.options.warnings(given):
        key = conflict.keys[0]
        yield f"{sources[key].place}: {key} {conflict.text}"
    for lacking, names in (*engine.without_effect(machine), *_without_adapters(engine.options)):
        for key in (f"option.{name}" for name in names):
            if key in given:
                yield f"{sources[key].place}: {key} has no effect without {lacking}"


def _without_adapters(options: ModelOptions) -> Iterator[tuple[str, Collection[str]]]:
    if not options.enable_lora:
        yield "option.enable_lora=true", ["dynamic_lora_loading_path"]
    if options.dynamic_lora_loading_path is None:
        yield "option.dynamic_lora_loading_path", ["max_num_adapters_per_replica"]


def _keys_of_user(sources: Given) -> Collection[str]:
    return {key for key, source in sources.items() if source.layer not in DERIVED}


def _values_of_user(options: Options, sources: Given) -> Sequence[tuple[Option, Source, object]]:
    """Return the options that a user gave a value; derived values are skipped, because the user cannot fix them."""
    return [
        (option, sources[option.key], getattr(options, option.field))
        for option in options.declared_options()
        if option.key in sources and sources[option.key].layer not in DERIVED
    ]
