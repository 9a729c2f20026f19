"""The fields that constrain the output: OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`.

All of them become one StructuredOutputs. Two of them in one request contradict each other and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import StructuredOutputs
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field, Reader

_WHITESPACE = "guided_whitespace_pattern"


def _schema(name: str, value: Any) -> Any:
    """Read a JSON schema: an object, or the text of one."""
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{name} is not valid JSON: {error}; send a JSON schema") from None
    else:
        schema = value
    if not isinstance(schema, dict):
        raise fields.not_allowed(name, value, "send a JSON schema as an object")
    return value  # not `schema`: a text goes to the engine as the client wrote it


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise fields.not_allowed(name, value, "send a string that is not empty")
    return value


def _choices(name: str, value: Any) -> list[str]:
    choices = list(fields.strings(name, value))
    if not choices:
        raise fields.not_allowed(name, value, "send a list of the texts that the output may be")
    return choices


def _structural_tag(name: str, value: Any) -> str:
    return value if isinstance(value, str) and value else msgspec.json.encode(fields.mapping(name, value)).decode()


_KINDS: dict[str, Reader] = {
    "json": _schema,
    "json_object": fields.boolean,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
    "structural_tag": _structural_tag,
}
# How the JSON may be written; they go with a constraint and are none by themselves.
_JSON_STYLE: dict[str, Reader] = {
    "whitespace_pattern": _text,
    "disable_any_whitespace": fields.boolean,
    "disable_additional_properties": fields.boolean,
}


def _constraint(kind: Any, value: Any, **style: Any) -> StructuredOutputs:
    return StructuredOutputs(kind=kind, value=value, **style)


def response_format(name: str, value: Any) -> StructuredOutputs | None:
    """Read OpenAI's response_format, also with text-generation-inference's types and fields.

    Return None for plain text. Raises RequestError, also for a field that a type does not have: it would constrain
    nothing.
    """
    kind = fields.mapping(name, value).get("type")
    if kind == "structural_tag":
        return _constraint("structural_tag", _structural_tag(name, value))
    if kind in ("json", "regex"):
        return _grammar(name, value)
    if kind not in ("text", "json_object", "json_schema"):
        raise fields.not_allowed(f"{name}.type", kind, "send text, json_object, json_schema or structural_tag")
    given = {key: found for key, found in value.items() if found is not None and key not in _ABOUT_FORMAT}
    wrong = sorted(given.keys() - (() if kind == "text" else _FORMAT_SCHEMAS))
    if wrong:
        raise RequestError(f"{name}.{excerpt(wrong[0])} has no meaning with type {kind}; leave it out")
    if len(given) > 1:
        raise RequestError(f"{name}: {' and '.join(sorted(given))} exclude each other; send one of them")
    if given:
        return _format_schema(name, kind, *given.items())
    if kind == "json_schema":
        raise fields.not_allowed(f"{name}.json_schema", None, 'send {"name": "...", "schema": {...}}')
    return None if kind == "text" else _constraint("json_object", True)


_ABOUT_FORMAT = frozenset({"type", "name", "description", "strict"})
_FORMAT_SCHEMAS = frozenset({"json_schema", "schema", "value"})  # OpenAI's, other servers', text-generation-inference's


def _format_schema(name: str, kind: str, given: tuple[str, Any]) -> StructuredOutputs:
    key, value = given
    if key == "json_schema" and (kind == "json_schema" or "schema" in fields.mapping(f"{name}.{key}", value)):
        key, value = "json_schema.schema", fields.mapping(f"{name}.{key}", value).get("schema")
    schema = _schema(f"{name}.{key}", value)
    anything = kind == "json_object" and schema in ({}, "{}")
    return _constraint("json_object", True) if anything else _constraint("json", schema)


def _structured_outputs(name: str, value: Any) -> StructuredOutputs | None:
    """Read vLLM's structured_outputs: one kind of constraint, and the style of the JSON."""
    known = {kind: Field(kind, read) for kind, read in (_KINDS | _JSON_STYLE).items()}
    found, unknown = fields.read_fields(fields.mapping(name, value), known, f"{name}.")
    if unknown:
        raise RequestError(f"{name}.{excerpt(unknown[0])} is not known; send one of {', '.join(_KINDS)}")
    style = {name: found.pop(name) for name in _JSON_STYLE if name in found}
    if found.get("json_object") is False:  # clients that send every field send this one as false
        del found["json_object"]
    if len(found) > 1:
        raise RequestError(f"{name}: {' and '.join(found)} exclude each other; send one of them")
    return next((_constraint(kind, read, **style) for kind, read in found.items()), None)


def _guided_reader(kind: str) -> Reader:
    """Return the reader of a field that is one kind of constraint by itself."""

    def read(name: str, value: Any) -> StructuredOutputs | None:
        found = _KINDS[kind](name, value)
        return None if found is False else _constraint(kind, found)

    return read


def _grammar(name: str, value: Any) -> StructuredOutputs | None:
    """Read text-generation-inference's grammar: {"type": "json" or "regex", "value": ...}."""
    kind = fields.mapping(name, value).get("type")
    if kind not in ("json", "regex"):
        raise fields.not_allowed(f"{name}.type", kind, "send json or regex")
    return _constraint(kind, _KINDS[kind](f"{name}.value", value.get("value")))


_READERS: dict[str, Reader] = {
    "response_format": response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{kind}": _guided_reader(kind) for kind in ("json", "json_object", "regex", "choice", "grammar")},
    "structural_tag": _guided_reader("structural_tag"),
    "grammar": _grammar,
}
# Each field has a target of its own: so `find` can name two that contradict each other.
FIELDS: dict[str, Field] = {
    **{name: Field(name, read, "structured_outputs") for name, read in _READERS.items()},
    _WHITESPACE: Field(_WHITESPACE, _text, "structured_outputs"),
    "guided_decoding_backend": Field(None, fields.ignored),  # the engine chooses
}
NAMES = frozenset(FIELDS)
"""Their names."""


def find(values: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return the constraint among the `values` of a request by target; None if nothing constrains the output.

    Raises RequestError if two fields constrain it.
    """
    if NAMES.isdisjoint(values):
        return None
    found = [name for name in _READERS if values.get(name) is not None]
    if len(found) > 1:
        raise RequestError(f"{' and '.join(found)} exclude each other; send one of them")
    constraint: StructuredOutputs | None = values[found[0]] if found else None
    if constraint is None or _WHITESPACE not in values:
        return constraint
    return msgspec.structs.replace(constraint, whitespace_pattern=values[_WHITESPACE])
