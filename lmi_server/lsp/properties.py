"""Completion and hover in serving.properties."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmi_server.configuration.checks.model_checks import declared_options
from lmi_server.configuration.choice.deciding_keys import ENTRY_POINT
from lmi_server.configuration.declaration import Option, written
from lmi_server.configuration.engine import load_engine_type
from lmi_server.configuration.handlers import HANDLERS, HandlerSpec
from lmi_server.configuration.properties import edited_properties
from lmi_server.contract.errors import ConfigurationError
from lmi_server.explain.explanation import ExplainedOption, Explanation, explain
from lmi_server.lsp.checked import Checked, Surroundings, inspect_text
from lmi_server.lsp.offers import Offer, code, document_of, key_offer, lines_of, markdown

_KEY = re.compile(r"[ \t\f]*([^=: \t\f#!]*)")
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")


def completions(text: str, line: int, column: int, checked: Checked) -> Sequence[Offer]:
    """Return what may stand at `column` of `line`, both from 0."""
    lines = lines_of(text)
    before = lines[line][:column] if line < len(lines) else ""
    if before.lstrip()[:1] in ("#", "!"):
        return ()
    key, start, value = _split(before)
    spec = _spec(checked)
    if value is None:
        others = {_split(each)[0] for number, each in enumerate(lines) if number != line}
        return [*_keys(spec, others, start), *_engine_keys(spec, others, start)]
    return [Offer(choice, value, "value") for choice in _values(_option(spec, key))]


def hover(path: Path, text: str, line: int, checked: Checked, around: Surroundings) -> str | None:
    """Return what the key in `line` means, what it is on this machine and why, as Markdown; None if there is no key."""
    lines = lines_of(text)
    key = _split(lines[line])[0] if line < len(lines) else ""
    if not key:
        return None
    option = _option(_spec(checked), key)
    if option is None:
        title = key.removeprefix("option.")
        known = title in load_engine_type(_spec(checked)).argument_names()
        return markdown(key, iter(["An argument of the engine, which gets it."])) if known else None
    return markdown(option.key, _describe(option, key, path, text, checked, around))


def _describe(option: Option, key: str, path: Path, text: str, checked: Checked, around: Surroundings) -> Iterator[str]:
    yield document_of(option)
    if key != option.key:
        yield f"{code(key)} is another spelling of it."
    here = _find_option(checked.explanation, option.key)
    if here is not None:
        yield f"Here: {_with_origin(here)}"
        if here.note:
            yield here.note
    try:
        without = explain(inspect_text(path, edited_properties(text, {key: None}), around))
    except ConfigurationError:
        return
    other = _find_option(without, option.key)
    if other is not None:
        yield f"Without this line, on this machine: {_with_origin(other)}"


def _with_origin(explained: ExplainedOption) -> str:
    origin = explained.layer if not explained.place else f"{explained.layer}, {explained.place}"
    return f"{code(written(explained.value))} ({origin})"


def _find_option(explanation: Explanation | None, key: str) -> ExplainedOption | None:
    options = () if explanation is None else explanation.options
    return next((each for each in options if each.key == key), None)


def _spec(checked: Checked) -> HandlerSpec:
    return HANDLERS.default if checked.found is None else checked.found.spec


def _split(line: str) -> tuple[str, int, int | None]:
    """Return the key of a line, where it begins, and where its value begins; None if the line ends with the key."""
    match = _KEY.match(line)
    assert match is not None, "the expression takes every line"
    separator = _SEPARATOR.match(line, match.end())
    assert separator is not None, "this one too"
    return match[1], match.start(1), separator.end() if separator.end() > match.end() else None


def _option(spec: HandlerSpec, key: str) -> Option | None:
    """Return the option that a key is a spelling of, declared by the handler or else by any."""
    own = (option for option in declared_options(spec) if key in option.keys)
    others = (option for each in HANDLERS.specs for option in declared_options(each) if key in option.keys)
    return next(own, None) or next(others, None)


def _keys(spec: HandlerSpec, others: set[str], start: int) -> Iterator[Offer]:
    for option in declared_options(spec):
        if others.isdisjoint(option.keys):
            yield key_offer(option, start)


def _engine_keys(spec: HandlerSpec, others: set[str], start: int) -> Iterator[Offer]:
    declared = {key for option in declared_options(spec) for key in option.keys}
    for key in sorted(f"option.{name}" for name in load_engine_type(spec).argument_names()):
        if key not in others and key not in declared:
            yield Offer(key, start, "key", detail="an argument of the engine", insert=f"{key}=")


def _values(option: Option | None) -> Sequence[str]:
    if option is None:
        return ()
    return HANDLERS.entry_points() if option.key == ENTRY_POINT else [written(choice) for choice in option.choices]
