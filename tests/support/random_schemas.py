"""JSON schemas at random, and which of their answers a grammar of tokens can be held to."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_NAMES = st.text('abcdefg_ "é\\', min_size=1, max_size=6)
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-1000, 1000), st.sampled_from([0.5, -1.25]), st.text(max_size=8)
)


def _bounded(kind: str, low: str, high: str, most: int) -> st.SearchStrategy[dict[str, Any]]:
    """A schema of `kind` with two bounds, either of which may be missing."""
    first = st.none() | st.integers(0, most)
    return st.tuples(first, st.integers(0, most), st.booleans()).map(
        lambda drawn: (
            {"type": kind}
            | ({} if drawn[0] is None else {low: drawn[0]})
            | ({high: (drawn[0] or 0) + drawn[1]} if drawn[2] else {})
        )
    )


_LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {}]),
    _bounded("integer", "minimum", "maximum", 5000),
    _bounded("integer", "exclusiveMinimum", "maximum", 50).filter(
        lambda schema: schema.get("maximum", 99) > schema.get("exclusiveMinimum", 0)
    ),
    _bounded("string", "minLength", "maxLength", 8),
    st.sampled_from(["^[a-z]{2,5}$", "^(red|green)-[0-9]+$", "[A-Z]x?", "^\\w+@\\w+\\.com$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "date-time", "uuid", "ipv4", "email", "time"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(_SCALARS, min_size=1, max_size=5).map(lambda values: {"enum": values}),
    _SCALARS.map(lambda value: {"const": value}),
    st.lists(st.sampled_from(["null", "boolean", "integer", "string"]), min_size=1, max_size=3, unique=True).map(
        lambda kinds: {"type": kinds}
    ),
)


@st.composite
def _objects(draw: st.DrawFn, parts: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, parts, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    additional = draw(st.sampled_from([None, False, {"type": "integer"}]))
    return schema if additional is None else schema | {"additionalProperties": additional}


def _arrays(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.tuples(_bounded("array", "minItems", "maxItems", 3), parts).map(
        lambda drawn: drawn[0] | {"items": drawn[1]}
    )
    tuples = st.lists(parts, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    )
    return bounded | tuples


def _nested(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    choices = st.lists(parts, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    named = parts.map(lambda part: {"$defs": {"part": part}, "$ref": "#/$defs/part"}).filter(
        lambda schema: "$defs" not in str(schema["$defs"])  # a reference means the definitions of the whole schema
    )
    tree = {
        "$defs": {
            "tree": {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
        },
        "$ref": "#/$defs/tree",
    }
    return _objects(parts) | _arrays(parts) | choices | st.just(tree) | named


def json_schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of every type that nest: objects, arrays, tuples, alternatives, references, bounds, patterns, formats."""
    part = st.recursive(_LEAVES, lambda parts: _objects(parts) | _arrays(parts), max_leaves=6)
    return st.one_of(_nested(part), _objects(part), part)
