"""Turns a constraint on the output into the text of a grammar in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import llguidance.gbnf_to_lark
import msgspec

from handlers.structured_output import limits
from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import StructuredOutputs

_SPECIAL = frozenset(r"\.+*?()|[]{}^$/")  # characters that mean something in a regular expression between slashes
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def grammar_text(constraint: StructuredOutputs) -> str:
    """Return the grammar of a constraint. Raises RequestError, with the remedy, if it is not one."""
    return _TEXTS[constraint.kind](constraint)


def _json(constraint: StructuredOutputs) -> str:
    schema = constraint.value
    if isinstance(schema, str):
        limits.check_text("json", schema)
        schema = msgspec.json.decode(schema)
    limits.check_schema(schema)
    text = f"%llguidance {{}}\nstart: {_json_rule(schema, constraint)}\n"
    limits.check_text("json", text)
    return text


def _json_rule(schema: Mapping[str, Any], style: StructuredOutputs) -> str:
    """Return the part of a grammar for the contents of a schema."""
    if style.disable_additional_properties:
        schema = _without_additional_properties(schema)
    # Of several alternatives in `oneOf`, an answer that matches one may match a second as well: the grammar cannot
    # know. Schemas of tagged unions, as pydantic makes them, have alternatives that exclude each other.
    options = {"coerce_one_of": True, **_white_space(style)}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _white_space(style: StructuredOutputs) -> dict[str, Any]:
    """Return the library's options for white space.

    Its own `whitespace_pattern` may match any number of times between two tokens, so that no pattern bounds it. Around
    a separator a pattern matches once; elsewhere every allowed pattern takes no white space.
    """
    if style.disable_any_whitespace:
        return {"whitespace_flexible": False}
    if style.whitespace_pattern is None:
        return {"whitespace_flexible": True}
    blanks = f"({limits.white_space(style.whitespace_pattern)})"
    around = {f"{name}_separator": f"{blanks}{sign}{blanks}" for name, sign in (("item", ","), ("key", ":"))}
    return {"whitespace_flexible": False, **around}


def _without_additional_properties(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it names (vLLM's disable_additional_properties)."""
    if isinstance(schema, list):
        return [_without_additional_properties(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _without_additional_properties(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def _regex(constraint: StructuredOutputs) -> str:
    limits.check_text("regex", constraint.value)
    # As in a JSON schema, digits and letters are those of ASCII.
    return f"start: /{llguidance.regex_to_lark(constraint.value, 'dw')}/\n"


def _choice(constraint: StructuredOutputs) -> str:
    limits.check_choices(constraint.value)
    return f"start: /{'|'.join(map(_literal, constraint.value))}/\n"


def _literal(text: str) -> str:
    """Return the regular expression that matches a text alone."""
    return "".join("\\" + letter if letter in _SPECIAL else _CONTROL.get(letter, letter) for letter in text)


def _grammar(constraint: StructuredOutputs) -> str:
    """Return a grammar in Lark's form as it is, one in EBNF (GBNF) in Lark's form."""
    text: str = constraint.value
    limits.check_text("grammar", text)
    try:
        return llguidance.gbnf_to_lark.any_to_lark(text)
    # The border to the library's parser, which raises whatever its code runs into.
    except Exception as error:
        raise RequestError(
            f"the grammar cannot be read: {error}; send EBNF (`root ::= ...`) or Lark (`start: ...`)"
        ) from error


def _structural_tag(constraint: StructuredOutputs) -> str:
    """Return the grammar of free text with tags, whose content matches a schema."""
    limits.check_text("structural_tag", constraint.value)
    try:
        described = msgspec.json.decode(constraint.value)
        triggers, tags = _triggers_and_tags(described.get("format", described))
        parts = [_tag(begin, schema, end, triggers, constraint) for begin, schema, end in tags]
        # Triggers are text: what follows a special token would be left out of the answer with it.
        return llguidance.StructTag.to_grammar(parts, assume_special=False)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
        raise RequestError(
            'structural_tag is not one that this server knows; send {"type": "structural_tag", "structures":'
            ' [{"begin": ..., "schema": {...}, "end": ...}], "triggers": [...]}, or a `format` of type triggered_tags'
            f" with contents of type json_schema ({type(error).__name__}: {error})"
        ) from error


def _triggers_and_tags(described: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, Any, str]]]:
    """Return the triggers of a structural tag, and begin, schema and end of its tags, in either of its two forms."""
    if "structures" in described:
        return described["triggers"], [(tag["begin"], tag["schema"], tag["end"]) for tag in described["structures"]]
    return described["triggers"], [(tag["begin"], _content(tag["content"]), tag["end"]) for tag in described["tags"]]


def _content(content: Mapping[str, Any]) -> Any:
    """Return the JSON schema of what a tag contains."""
    if content.get("style", "json") != "json":
        raise ValueError("a style of content that is not JSON")
    schema = content["json_schema"]
    return {} if schema is True else schema


def _tag(begin: str, schema: Any, end: str, triggers: list[str], style: StructuredOutputs) -> llguidance.StructTag:
    limits.check_schema(schema)
    trigger = next(trigger for trigger in [*triggers, begin] if trigger and begin.startswith(trigger))
    content = _json_rule(schema, style).removeprefix("%json ")
    return llguidance.StructTag(trigger=trigger, begin=begin, grammar=content, end=end)


_TEXTS: dict[str, Callable[[StructuredOutputs], str]] = {
    "json": _json,
    "json_object": lambda constraint: f"%llguidance {{}}\nstart: {_json_rule({'type': 'object'}, constraint)}\n",
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
