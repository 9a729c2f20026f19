"""Checks resolved values against their declarations; every finding is one line that names place, key and value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError

from lmi_server.configuration.declaration import Deprecated, NoEffect, Option, Options, Unavailable
from lmi_server.configuration.layers import Given, Source
from lmi_server.configuration.options import ServingOptions

_AnyOptions = TypeVar("_AnyOptions", bound=Options)


def build(options_type: type[_AnyOptions], sources: Given) -> tuple[_AnyOptions, list[str]]:
    """Return the typed options and the problems with them.

    A bad value has its default in the result, so that the checks that follow can report the others.
    """
    declared = {option.field: option for option in options_type.declared() if option.key in sources}
    values = {field: sources[option.key].raw for field, option in declared.items()}
    wrong = _wrong_fields(options_type, values)
    sound = {field: value for field, value in values.items() if field not in wrong}
    return options_type.model_validate(sound), [_bad_value(declared[field], sources) for field in wrong]


def _wrong_fields(options_type: type[Options], values: Mapping[str, str]) -> list[str]:
    try:
        options_type.model_validate(values)
    except ValidationError as error:
        return list(dict.fromkeys(str(detail["loc"][0]) for detail in error.errors()))
    return []


def _bad_value(option: Option, sources: Given) -> str:
    return f"{told(sources[option.key], option.key)} is not allowed; allowed: {option.allowed}"


def told(source: Source, key: str) -> str:
    """Return place, key and value as every message begins."""
    return f'{source.where}: {key} = "{source.raw}"'


def unavailable(options: Options, sources: Given) -> Iterator[str]:
    """Yield a problem for each documented value that this version cannot serve."""
    for option, source, value in _decided(options, sources):
        for mark in option.marks:
            if isinstance(mark, Unavailable) and mark.applies(value):
                yield f"{told(source, option.key)} is not available in this version; {mark.instead}"


def contradictions(serving: ServingOptions, sources: Given) -> Iterator[str]:
    """Yield a problem where two values do not go together."""
    if serving.min_workers > serving.max_workers:
        key = "maxWorkers" if "maxWorkers" in sources else "minWorkers"
        yield (
            f"{told(sources[key], key)} is not allowed; allowed: maxWorkers (here {serving.max_workers}) "
            f"not below minWorkers (here {serving.min_workers})"
        )


def doubts(options: Options, sources: Given) -> Iterator[str]:
    """Yield a warning for each key that is deprecated or changes nothing."""
    for option, source, _ in _decided(options, sources):
        for mark in option.marks:
            if isinstance(mark, Deprecated):
                yield f"{source.where}: {option.key} is deprecated: {mark.advice}"
            elif isinstance(mark, NoEffect):
                yield f"{source.where}: {option.key} has no effect here: {mark.reason}"


def _decided(options: Options, sources: Given) -> Sequence[tuple[Option, Source, object]]:
    return [
        (option, sources[option.key], getattr(options, option.field))
        for option in options.declared()
        if option.key in sources
    ]
