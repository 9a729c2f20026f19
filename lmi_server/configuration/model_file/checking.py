"""Checks a document against its declaration; every problem is a line with file, line, key, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from lmi_server.configuration.declaration import NoEffect, Unavailable, allowed_values, validated
from lmi_server.configuration.layers import nearest_key
from lmi_server.configuration.model_file.positions import KeyPath, YamlDocument
from lmi_server.configuration.model_file.serve_sections import Section, section_of
from lmi_server.contract.errors import ConfigurationError

_AnySection = TypeVar("_AnySection", bound=Section)


def validate(document: YamlDocument, section: type[_AnySection]) -> tuple[_AnySection, YamlDocument]:
    """Return the typed document, and the document under present names, without keys that say null.

    Raises ConfigurationError with all problems, one per line, in the order of the file.
    """
    problems: list[tuple[int, str]] = []
    document = _under_present_names(document, section, problems)
    try:
        typed = validated(section, document.data)
    except ValidationError as error:
        problems += [_problem(document, section, dict(found)) for found in error.errors()]
        raise _joined(problems) from error
    problems += [(document.line(path), text) for path, text in _unavailable(document, typed, ())]
    if problems:
        raise _joined(problems)
    return typed, document


def without_effect(document: YamlDocument, section: Section, path: KeyPath = ()) -> Iterator[str]:
    """Yield a warning for each given key that nothing here reads."""
    for name, field, value in _given_fields(section):
        here = (*path, name)
        for mark in field.metadata:
            if isinstance(mark, NoEffect):
                yield f"{document.label(here)} has no effect here: {mark.reason}"
        if isinstance(value, Section):
            yield from without_effect(document, value, here)


def _unavailable(document: YamlDocument, section: Section, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for name, field, value in _given_fields(section):
        here = (*path, name)
        marks = [mark for mark in field.metadata if isinstance(mark, Unavailable) and mark.applies(value)]
        for mark in marks:
            yield here, f"{document.label(here)} is not available; {mark.instead}"
        if isinstance(value, Section) and not marks:
            yield from _unavailable(document, value, here)


def _given_fields(section: Section) -> Iterator[tuple[str, FieldInfo, Any]]:
    for name in section.model_fields_set:
        yield name, type(section).model_fields[name], getattr(section, name)


def _under_present_names(
    document: YamlDocument, section: type[Section], problems: list[tuple[int, str]]
) -> YamlDocument:
    """Return the document with the keys' names of today, and without keys that say null."""
    lines, renamed = dict(document.lines), dict[KeyPath, str]()

    def present(section: type[Section] | None, data: Any, path: KeyPath) -> Any:
        if section is None or not isinstance(data, dict):
            return data
        names = {old: name for name, declared in section.model_fields.items() for old in _former_names(declared)}
        result: dict[str, Any] = {}
        for key, value in data.items():
            name, here = names.get(key) or str(key), (*path, key)
            if value is None:
                continue
            if name in result:
                other = renamed.get((*path, name), name)
                text = f"{document.place(here)}: {key} is not allowed beside {other}, which is the same key; remove one"
                problems.append((document.line(here), text))
                continue
            if name != key:
                lines[(*path, name)] = document.line(here)
                renamed[(*path, name)] = str(key)
            nested = section_of(section.model_fields[name].annotation) if name in section.model_fields else None
            result[name] = present(nested, value, (*path, name))
        return result

    return replace(document, data=present(section, document.data, ()), lines=lines, renamed=renamed)


def _former_names(field: FieldInfo) -> list[str]:
    extra = field.json_schema_extra
    names = extra.get("formerly", []) if isinstance(extra, Mapping) else []
    return [str(name) for name in names] if isinstance(names, list) else []


def _problem(document: YamlDocument, section: type[Section], error: dict[str, Any]) -> tuple[int, str]:
    path, field, holder = _find_declaration(section, tuple(error["loc"]))
    line, place, name = document.line(path), document.place(path), document.name(path)
    if error["type"] == "missing":
        assert field is not None, "only a declared key can be missing"
        return line, f"{place}: {name} is missing: {field.description}"
    if error["type"] == "extra_forbidden":
        return line, f"{place}: unknown key {name}; {_advice(path, holder)}"
    allowed = _describe_allowed(error["type"], field)
    value = error["input"]
    shown = f'"{value}"' if isinstance(value, str | int | float) else type(value).__name__
    return line, f"{place}: {name} = {shown} is not allowed; allowed: {allowed}"


def _find_declaration(section: type[Section], loc: KeyPath) -> tuple[KeyPath, FieldInfo | None, type[Section]]:
    """Return the path of a value without pydantic's names of union members, its field, and the section it is in."""
    path: KeyPath = ()
    field: FieldInfo | None = None
    holder = section
    for part in loc:
        inner = holder if field is None else section_of(field.annotation)
        if field is not None and inner is None:
            return (path, field, holder)  # inside a free mapping or a list: its own key is the place
        if field is not None and inner is not None:
            holder = inner
        if part not in holder.model_fields and field is not None and part == holder.__name__:
            continue
        field = holder.model_fields.get(str(part))
        path = (*path, part)
        if field is None:
            break
    return path, field, holder


def _advice(path: KeyPath, holder: type[Section]) -> str:
    known = list(holder.model_fields)
    nearest = nearest_key(str(path[-1]), known)
    return f"did you mean {nearest}?" if nearest else f"known: {', '.join(known)}"


def _describe_allowed(kind: str, field: FieldInfo | None) -> str:
    if kind in ("dict_type", "model_type"):
        return "a mapping"
    if kind == "list_type" or field is None:
        return "a list" if field is not None else "a mapping"
    return allowed_values(field.annotation, field.metadata)


def _joined(problems: list[tuple[int, str]]) -> ConfigurationError:
    # A union reports one error for each of its members.
    lines = dict.fromkeys(text for _, text in sorted(problems, key=lambda found: found[0]))
    return ConfigurationError.from_problems(lines)


def allowed_in_words(field: FieldInfo) -> str:
    """Return in words what a field of a section takes."""
    try:
        return allowed_values(field.annotation, field.metadata)
    except KeyError:
        return "a list of mappings" if "list" in str(field.annotation) else "a mapping"
