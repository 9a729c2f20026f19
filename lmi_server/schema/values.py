"""The JSON Schema of one option's value.

A value is a text, as a file of properties has it, or what JSON has for it (8, true). The schema accepts whatever
`lmi-server check` accepts, and refuses wrong numbers and words. Only `check` sees what needs more than one value.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lmi_server.configuration.declaration import Deprecated, NoEffect, Option, written

Schema = dict[str, Any]
"""A JSON Schema, or a part of one."""

_ANY_TEXT: Schema = {"type": "string"}
_TRUTHS = ("true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n")
_SPACE = r"\s*"
_DIGITS = r"[\d_]*"
_WORDS = re.compile(r"[\w.+*-]+")
_SPECIAL = re.compile(r"[.*+?^${}()|\[\]\\/]")


def value_schema(option: Option) -> Schema:
    """Return the schema of the value of `option`, a text or what JSON has for it."""
    info = option.declared_by.model_fields[option.field]
    found = _distinct(_alternatives(info.annotation, info.metadata, _adapter(info)))
    if _ANY_TEXT in found:
        found = [part for part in found if part.get("type") != "string" and "enum" not in part] + [_ANY_TEXT]
    else:
        # No value leaves a key unset, and so does LMI's word for it if there is no default.
        found.append({"enum": ["", "None"] if option.default is None else [""]})
    return found[0] if len(found) == 1 else {"anyOf": found}


def annotations_of(option: Option) -> Schema:
    """Return the annotations of a key: description, default, whether it is deprecated."""
    notes = [mark.advice for mark in option.marks if isinstance(mark, Deprecated)]
    idle = [mark.reason for mark in option.marks if isinstance(mark, NoEffect)]
    text = " ".join((option.description, f"Allowed: {option.allowed}.", *(f"No effect: {why}." for why in idle)))
    return {
        "description": text,
        **({"default": written(option.default)} if option.default is not None else {}),
        **({"deprecated": True} if notes else {}),
    }


def _adapter(info: FieldInfo) -> TypeAdapter[Any]:
    annotation: Any = info.annotation
    return TypeAdapter(Annotated[annotation, *info.metadata] if info.metadata else annotation)


def _accepts(adapter: TypeAdapter[Any], text: str) -> bool:
    try:
        adapter.validate_python(text)
    except ValidationError:
        return False
    return True


def _alternatives(annotation: Any, metadata: Sequence[Any], adapter: TypeAdapter[Any]) -> Iterator[Schema]:
    """Yield the schemas; a value must match one of them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(annotation.__origin__, (*annotation.__metadata__, *metadata), adapter)
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member, metadata, adapter)
    elif origin is Literal:
        yield from _words(get_args(annotation), metadata, adapter)
    elif annotation is bool:
        yield {"type": "boolean"}
        yield {"enum": ["true", "false"]}
        yield {"type": "string", "pattern": f"^{_any_case(_TRUTHS)}$"}
    elif annotation in (int, float):
        yield from _numbers(annotation is int, _bounds(metadata))
    elif annotation is not types.NoneType:
        yield _text(metadata)


def _words(choices: Sequence[Any], metadata: Sequence[Any], adapter: TypeAdapter[Any]) -> Iterator[Schema]:
    """Yield the words that a value may be; in any case, and with further spellings, if the option takes them."""
    texts = [str(choice) for choice in choices]
    yield {"enum": texts}
    yield from ({"const": choice} for choice in choices if not isinstance(choice, str))
    if not all(_accepts(adapter, text.upper()) for text in texts):
        return
    allowed = " ".join(getattr(mark, "text", "") for mark in metadata)
    others = [word for word in _WORDS.findall(allowed) if not word.isdigit() and _accepts(adapter, word)]
    yield {"type": "string", "pattern": f"^{_any_case(dict.fromkeys((*texts, *others)))}$"}


def _text(metadata: Sequence[Any]) -> Schema:
    """Return the schema of a text; its pattern says nothing if another function changes the text before it."""
    if any(isinstance(mark, BeforeValidator) for mark in metadata):
        return _ANY_TEXT
    pattern = next((part.pattern for part in _constraints(metadata) if getattr(part, "pattern", None)), None)
    return _ANY_TEXT if pattern is None else {"type": "string", "pattern": pattern}


def _numbers(is_integer: bool, bounds: Schema) -> Iterator[Schema]:
    yield {"type": "integer" if is_integer else "number", **bounds}
    lower = bounds.get("minimum", bounds.get("exclusiveMinimum"))
    sign = r"[+-]?" if lower is None or lower < 0 else r"\+?"
    if is_integer:
        digit = "[1-9]" if lower is not None and lower > 0 else r"\d"
        number, zero = rf"{_DIGITS}{digit}{_DIGITS}(\.[0_]*)?", r"\+?[0_]*-[0_]+(\.[0_]*)?"
    else:
        exponent = r"([eE]_?[+-]?[\d_]+)?"  # pydantic takes a _ between any two other characters
        number, zero = rf"[\d_.]*\d[\d_.]*{exponent}", rf"-[0_.]*0[0_.]*{exponent}"
    number += f"|{zero}" if lower == 0 else ""  # which is no number below 0
    yield {"type": "string", "pattern": f"^{_SPACE}({sign}{number}){_SPACE}$"}


def _bounds(metadata: Sequence[Any]) -> Schema:
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {
        name: value
        for part in _constraints(metadata)
        for short, name in names.items()
        if (value := getattr(part, short, None)) is not None
    }


def _constraints(metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield the constraints in the metadata of a type; pydantic keeps those of a nested Field inside it."""
    for part in metadata:
        if isinstance(part, FieldInfo):
            yield from part.metadata
        else:
            yield part


def _any_case(words: Sequence[str] | dict[str, Any]) -> str:
    """Return the pattern of these words in any mixture of capitals; JSON Schema's patterns have no flag for it."""
    return f"({'|'.join(''.join(map(_letter, word)) for word in words)})"


def _letter(character: str) -> str:
    if character.isalpha():
        return f"[{character.lower()}{character.upper()}]"
    return _SPECIAL.sub(r"\\\g<0>", character)


def _distinct(schemas: Iterator[Schema]) -> list[Schema]:
    found: list[Schema] = []
    for schema in schemas:
        if schema not in found:
            found.append(schema)
    return found
