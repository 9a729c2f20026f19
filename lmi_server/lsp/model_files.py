"""Completion and hover in Ray's model files, whose sections are declared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pydantic.fields import FieldInfo

from lmi_server.configuration.declaration import NoEffect, Unavailable, choices_of, written
from lmi_server.configuration.layers import Source
from lmi_server.configuration.model_file.application import ApplicationFile, ApplicationSection, ServingArguments
from lmi_server.configuration.model_file.checking import allowed_in_words
from lmi_server.configuration.model_file.llm_config import LlmConfigFile
from lmi_server.configuration.model_file.rayllm import RayLlmFile
from lmi_server.configuration.model_file.read import engine_argument_names
from lmi_server.configuration.model_file.serve_sections import Section, section_of
from lmi_server.lsp.checked import Checked
from lmi_server.lsp.offers import Offer, code, lines_of, markdown

_LINE = re.compile(r"( *)((?:- +)*)([\w.-]*)(:?)( *)")
_TOPS: dict[str, type[Section]] = {
    "engine_config": RayLlmFile,
    "model_loading_config": LlmConfigFile,
    "applications": ApplicationFile,
    "llm_configs": ServingArguments,
}
_ITEMS: dict[str, type[Section]] = {"applications": ApplicationSection, "llm_configs": LlmConfigFile}
_ENGINE_ARGUMENTS = "engine_kwargs"


def completions(text: str, line: int, column: int) -> Sequence[Offer]:
    """Return what may stand at `column` of `line`, both from 0."""
    lines = lines_of(text)
    before = lines[line][:column] if line < len(lines) else ""
    match = _LINE.match(before)
    if match is None or "#" in before:
        return ()
    path = _path(lines, line, match.start(3))
    section = _section(lines, path)
    if match[4]:
        field = None if section is None else section.model_fields.get(match[3])
        values = () if field is None else choices_of(field.annotation)
        return [Offer(written(choice), match.end(), "value") for choice in values]
    return [*_keys(section, match.start(3)), *_arguments(path, match.start(3))]


def hover(text: str, line: int, checked: Checked) -> str | None:
    """Return what the key in `line` means, and the keys of serving.properties that it stands for, as Markdown."""
    lines = lines_of(text)
    match = _LINE.match(lines[line]) if line < len(lines) else None
    if match is None or not match[4]:
        return None
    name, path = match[3], _path(lines, line, match.start(3))
    section = _section(lines, path)
    field = None if section is None else _fields(section).get(name)
    if field is None and path[-1:] != [_ENGINE_ARGUMENTS]:
        return None
    about = ["An argument of the engine."] if field is None else _describe(field)
    return markdown(name, iter([*about, *_stands_for(".".join((*path, name)), checked)]))


def _describe(field: FieldInfo) -> Iterator[str]:
    yield f"{field.description or ''}\n\nAllowed: {allowed_in_words(field)}."
    if not field.is_required() and isinstance(field.default, str | int | float):
        yield f"Default: {code(written(field.default))}"
    for mark in field.metadata:
        if isinstance(mark, NoEffect):
            yield f"No effect: {mark.reason}."
        if isinstance(mark, Unavailable):
            yield f"{mark.shown or 'Some values are'} not available; {mark.instead}."


def _stands_for(name: str, checked: Checked) -> Iterator[str]:
    sources = {} if checked.found is None else {**checked.found.sources, **checked.found.unknown}
    for key, source in sources.items():
        if _is_of(source, name) and key != "option.env":  # which may hold secrets
            yield f"Here: {code(f'{key}={source.raw}')} ({source.layer})"


def _is_of(source: Source, name: str) -> bool:
    return source.layer == "model file" and source.spelling is not None and f".{name}".endswith(f".{source.spelling}")


def _path(lines: Sequence[str], line: int, indent: int) -> list[str]:
    """Return the keys above a line that hold what is indented so far, outermost first."""
    path: list[str] = []
    for above in reversed(lines[:line]):
        match = _LINE.match(above)
        if match is None or not match[4] or match.start(3) >= indent:
            continue
        path.insert(0, match[3])
        indent = match.start(3)
        if indent == 0:
            break
    return path


def _section(lines: Sequence[str], path: Sequence[str]) -> type[Section] | None:
    """Return the section that a path leads to; None if it is a free mapping, or the file has no known kind."""
    tops = (_TOPS.get(line.partition(":")[0]) for line in lines)
    section: type[Section] | None = next((top for top in tops if top is not None), None)
    for name in path:
        if section is None:
            return None
        field = _fields(section).get(name)
        section = _ITEMS.get(name) or (None if field is None else section_of(field.annotation))
    return section


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    """Return the fields of a section, also by their former names."""
    fields = dict(section.model_fields)
    for field in section.model_fields.values():
        extra = field.json_schema_extra
        former = extra.get("formerly") if isinstance(extra, dict) else None
        fields |= {str(name): field for name in (former if isinstance(former, list) else [])}
    return fields


def _keys(section: type[Section] | None, start: int) -> Iterator[Offer]:
    for name, field in ({} if section is None else section.model_fields).items():
        text = f"{field.description or ''}\n\nAllowed: {allowed_in_words(field)}."
        yield Offer(name, start, "key", detail="required" if field.is_required() else "", text=text, insert=f"{name}: ")


def _arguments(path: Sequence[str], start: int) -> Iterator[Offer]:
    if path[-1:] == [_ENGINE_ARGUMENTS]:
        for name in sorted(engine_argument_names()):
            yield Offer(name, start, "key", detail="an argument of the engine", insert=f"{name}: ")
