"""Refuses schemas, patterns and choices that no answer needs and that are slow to compile.

The rest may still be hostile, in ways that its size does not show: `check_process.py` finds out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import StructuredOutputs
from lmi_server.contract.texts.quoting import excerpt

_MAX_CHARACTERS = {"json": 2**18, "regex": 2**15, "choice": 2**18, "grammar": 2**17, "structural_tag": 2**18}
_MAX_CHOICES = 10_000
_DEEPEST = 100  # llguidance's parser of JSON ends at 128
# An array that must have more items fits in no answer; a greater upper bound is the same as none, but slow to compile.
_MAX_REPETITIONS = 10_000
_MAX_PROPERTIES = 400  # all of an object's optional properties may come next, and llguidance follows 2,000 ways at once
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength")
_SHORTER = "send a shorter one"

LABELS = {
    "json": "the JSON schema",
    "json_object": "json_object",
    "regex": "the regular expression",
    "choice": "choice",
    "grammar": "the grammar",
    "structural_tag": "structural_tag",
}
"""What messages call each kind of constraint."""


def check_text(kind: str, text: str) -> None:
    """Raise RequestError if the text of a constraint is too long."""
    limit = _MAX_CHARACTERS[kind]
    if len(text) > limit:
        raise RequestError(f"{LABELS[kind]} has {len(text)} characters, and may have {limit}; {_SHORTER}")


def check_choices(choices: list[str]) -> None:
    """Raise RequestError if there are too many choices."""
    if len(choices) > _MAX_CHOICES:
        raise RequestError(f"choice has {len(choices)} texts, and may have {_MAX_CHOICES}; send fewer")
    check_text("choice", "".join(choices))


_BLANK = r"(?: |\n|\r|\t|\\[nrts]|\\x(?:20|09|0[aAdD]))"
_WHITE_SPACE = re.compile(rf"(?:(?:{_BLANK}|\[{_BLANK}+\])(?:[?*]|\{{0,\d{{1,4}}\}}))*")
_LONGEST_PATTERN = 200  # characters


def white_space(pattern: str) -> str:
    """Return the pattern of white space in JSON with JSON's meaning of `\\s`.

    Raises RequestError unless it matches white space only, and no white space too.
    """
    if len(pattern) > _LONGEST_PATTERN or _WHITE_SPACE.fullmatch(pattern) is None:
        raise RequestError(
            f"whitespace_pattern: {excerpt(pattern)} is not allowed; send characters or classes of white space, each"
            r" with ?, * or {0,n}, such as [ ]? or [ \n]{0,8}"
        )
    return pattern.replace(r"\s", r"[ \n\r\t]")


def check_style(constraint: StructuredOutputs) -> None:
    """Raise RequestError for a style of JSON that only llguidance takes for each request."""
    for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(constraint, name):
            raise RequestError(
                f"{name} needs llguidance; leave it out, or serve the model without option.structured_outputs_config"
            )


def check_schema(schema: Any) -> None:
    """Raise RequestError, naming the place in the schema, if one of its parts is too large."""
    for path, part in _parts(schema):
        if len(path) > _DEEPEST:
            raise RequestError(f"the JSON schema is nested more than {_DEEPEST} levels deep; send a flatter one")
        if isinstance(part, Mapping):
            _check_counts(path, part)
            _check_properties(path, part)
        elif len(part) > _MAX_CHOICES:
            raise _refusal(path, f"has {len(part)} entries, and may have {_MAX_CHOICES}; send fewer")


def check_listed(constraint: StructuredOutputs, limit: int) -> None:
    """Raise RequestError if the texts that choices, or lists in a JSON schema, name have more than `limit` characters.

    The constraint is one that the other checks have passed. It is for an engine whose library looks at every character
    of such a text ahead: what takes 1 s for 65,000 characters takes 12 s for 250,000.
    """
    found = constraint.value
    if constraint.kind == "json":
        schema = msgspec.json.decode(found) if isinstance(found, str) else found
        found = [text for _, part in _parts(schema) if isinstance(part, Mapping) for text in _texts_of(part)]
    elif constraint.kind != "choice":
        return
    characters = sum(map(len, found))
    if characters > limit:
        place = "choice" if constraint.kind == "choice" else "the JSON schema: enum and const"
        raise RequestError(
            f"{place} has {characters} characters in its texts, and may have {limit} under vLLM; send fewer or shorter"
            " texts"
        )


def _texts_of(part: Mapping[str, Any]) -> Iterator[str]:
    values = part.get("enum")
    for value in (*(values if isinstance(values, list) else ()), part.get("const")):
        if isinstance(value, str):
            yield value


def _parts(schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every object and list in a schema with its path. It keeps a list, because a schema may be nested deeply."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        entries = part.items() if isinstance(part, Mapping) else enumerate(part)
        waiting += [((*path, str(name)), value) for name, value in entries if isinstance(value, Mapping | list)]


def _check_counts(path: tuple[str, ...], part: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        count = part.get(name)
        if isinstance(count, int | float) and count > _MAX_REPETITIONS:
            remedy = "leave it out" if name.startswith("max") else f"send {_MAX_REPETITIONS} at most"
            raise _refusal((*path, name), f"{count} is not allowed; {remedy}")


def _check_properties(path: tuple[str, ...], part: Mapping[str, Any]) -> None:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, Mapping) or len(properties) <= _MAX_PROPERTIES:
        return
    optional = len(properties) - (len(required) if isinstance(required, list) else 0)
    if optional > _MAX_PROPERTIES:
        raise _refusal(
            (*path, "properties"),
            f"has {optional} properties that are not required, and may have {_MAX_PROPERTIES}; send fewer, or name"
            " those in `required` that the answer always has",
        )


def _refusal(path: tuple[str, ...], problem: str) -> RequestError:
    return RequestError(f"the JSON schema: {'.'.join(path)[-200:]}: {problem}")
