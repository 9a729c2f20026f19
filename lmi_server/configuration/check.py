"""Checks merged values against their declarations. Each message is one line that names place, key, value and remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from lmi_server.configuration.declaration import (
    Conflict,
    Deprecated,
    DeprecatedValue,
    NoEffect,
    Option,
    Options,
    Unavailable,
)
from lmi_server.configuration.layers import DERIVED, Given, Source, value_advice
from lmi_server.configuration.model_code import MODEL_CODE, defines
from lmi_server.configuration.options import FORMATTERS, ModelOptions, ServingOptions

_AnyOptions = TypeVar("_AnyOptions", bound=Options)


def build(options_type: type[_AnyOptions], sources: Given) -> tuple[_AnyOptions, dict[str, str]]:
    """Return the typed options, and a problem for each key with a wrong value.

    A wrong value has its default in the result, so that later checks can report further problems in the same run.
    """
    declared = {option.field: option for option in options_type.declared() if option.key in sources}
    values = {field: sources[option.key].raw for field, option in declared.items()}
    wrong = _wrong_fields(options_type, values)
    sound = {field: value for field, value in values.items() if field not in wrong}
    bad = [option for field, option in declared.items() if field in wrong]
    return options_type.model_validate(sound), {option.key: _bad_value(option, sources) for option in bad}


def _wrong_fields(options_type: type[Options], values: Mapping[str, str]) -> list[str]:
    try:
        options_type.model_validate(values)
    except ValidationError as error:
        # One key may have several errors: each member of a union reports its own.
        return list(dict.fromkeys(str(detail["loc"][0]) for detail in error.errors()))
    return []


def _bad_value(option: Option, sources: Given) -> str:
    source = sources[option.key]
    advice = value_advice(source, option.allowed)
    return f"{describe_source(source, option.key)} is not allowed; allowed: {option.allowed}{advice}"


def describe_source(source: Source, key: str) -> str:
    """Return place, key and value, with which every message begins; key and value as the user wrote them."""
    written = source.raw if source.written is None else source.written
    return f'{source.place}: {source.spelling or key} = "{written}"'


def unavailable(options: Options, sources: Given) -> Iterator[str]:
    """Yield a problem for each documented value that this version cannot serve."""
    for option, source, value in _decided(options, sources):
        for mark in option.marks:
            if isinstance(mark, Unavailable) and mark.applies(value):
                yield f"{describe_source(source, option.key)} is not available in this version; {mark.instead}"
    for conflict in options.unavailable():
        key = conflict.keys[0]
        yield f"{describe_source(sources[key], key)} is not available in this version; {conflict.text}"


def conflicts(serving: ServingOptions, options: ModelOptions, sources: Given, wrong: Collection[str]) -> Iterator[str]:
    """Yield a problem for each combination of values that is not allowed.

    The keys in `wrong` have no valid value, so a combination with one of them cannot be judged and is skipped.
    """
    given = _given(sources)
    for conflict in (*_serving_conflicts(serving, options, given), *options.conflicts(given)):
        if not set(conflict.keys).isdisjoint(wrong):
            continue
        key = next((key for key in conflict.keys if key in sources), conflict.keys[0])
        place = describe_source(sources[key], key) if key in sources else key
        yield f"{place} is not allowed; allowed: {conflict.text}"


def _serving_conflicts(serving: ServingOptions, options: ModelOptions, given: Collection[str]) -> Iterator[Conflict]:
    if serving.min_workers > serving.max_workers:
        keys = ("maxWorkers", "minWorkers")
        here = f"maxWorkers (here {serving.max_workers}) not below minWorkers (here {serving.min_workers})"
        yield Conflict(keys, here)
    if options.one_worker_only is not None and serving.max_workers > 1:
        yield Conflict(("maxWorkers", options.one_worker_only), f"1 with {options.one_worker_only}=true")
    rolling = options.rolling_batch
    if serving.batch_size > 1 and "option.rolling_batch" in given and rolling not in ("disable", "auto"):
        allowed = f"1 with option.rolling_batch={rolling}; a rolling batch needs no dynamic batch"
        yield Conflict(("batch_size",), allowed)
    if serving.batch_size > 1 and options.enable_streaming != "false" and rolling == "disable":
        yield Conflict(("batch_size",), f"1 with option.enable_streaming={options.enable_streaming}")


def undefined_formatters(options: ModelOptions, sources: Given, model_dir: Path) -> Iterator[str]:
    """Yield a problem for each formatter that names a function which model.py does not define."""
    output = None if options.output_formatter in FORMATTERS else options.output_formatter
    path = model_dir / MODEL_CODE
    for key, name in (("option.input_formatter", options.input_formatter), ("option.output_formatter", output)):
        if name is None or (path.is_file() and defines(path, name)):
            continue
        missing = f"{path} does not define it" if path.is_file() else f"there is no {path} that defines it"
        allowed = next(option.allowed for option in options.declared() if option.key == key)
        yield f"{describe_source(sources[key], key)} is not allowed; {missing}; allowed: {allowed}"


def value_warnings(options: Options, sources: Given) -> Iterator[str]:
    """Yield a warning for each key that is deprecated or has no effect."""
    for option, source, _ in _decided(options, sources):
        for mark in option.marks:
            if isinstance(mark, Deprecated):
                yield f"{source.place}: {option.key} is deprecated: {mark.advice}"
            elif isinstance(mark, DeprecatedValue) and source.raw == mark.value:
                yield f"{describe_source(source, option.key)} is deprecated: {mark.advice}"
            elif isinstance(mark, NoEffect):
                yield f"{source.place}: {option.key} has no effect here: {mark.reason}"


def combination_warnings(options: ModelOptions, sources: Given) -> Iterator[str]:
    """Yield a warning for each key that has no effect because of the value of another key."""
    given = _given(sources)
    for conflict in (*options.warnings(given), *options.adapter_warnings(given)):
        key = conflict.keys[0]
        yield f"{sources[key].place}: {key} {conflict.text}"


def _given(sources: Given) -> Collection[str]:
    return {key for key, source in sources.items() if source.layer not in DERIVED}


def _decided(options: Options, sources: Given) -> Sequence[tuple[Option, Source, object]]:
    """Return the options that a user gave a value; derived values are skipped, because the user cannot fix them."""
    return [
        (option, sources[option.key], getattr(options, option.field))
        for option in options.declared()
        if option.key in sources and sources[option.key].layer not in DERIVED
    ]
