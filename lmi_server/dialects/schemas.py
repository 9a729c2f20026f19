"""JSON schemas of requests and answers, from the tables and types with which the dialects read and write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.dialects import routes
from lmi_server.dialects.fields import Field
from lmi_server.dialects.lmi.objects import WholeAnswer
from lmi_server.dialects.lmi.request import BODY, PARAMETERS
from lmi_server.dialects.openai import CHAT_FIELDS, COMPLETION_FIELDS, embeddings, images
from lmi_server.dialects.openai.responses import RESPONSE_FIELDS
from lmi_server.dialects.optional import Schema, optional_dialects
from lmi_server.dialects.vllm import tokens

# A field's reader is asked which of these it takes. A list or an object may need what only its own reader knows; its
# type then stays open. Empty values are no samples, because fields that are always refused take them.
_SAMPLES: Mapping[str, tuple[Any, ...]] = {
    "boolean": (True,),
    "number": (0.5, 1.5),
    "integer": (2,),  # readers of booleans take 0 and 1
    "string": ("a", "auto", "none", "float", "png", "b64_json"),
    "array": ([1], ["a"], [{"role": "user", "content": "a"}]),
    "object": ({"a": 1}, {"type": "text"}),
}
_BODIES: Mapping[str, Mapping[str, Field] | type | Schema] = {
    **optional_dialects().bodies,
    routes.COMPLETIONS: COMPLETION_FIELDS,
    routes.CHAT_COMPLETIONS: CHAT_FIELDS,
    routes.RESPONSES: RESPONSE_FIELDS,
    routes.EMBEDDINGS: embeddings.FIELDS,
    routes.IMAGES_GENERATIONS: images.GENERATION_FIELDS,
    routes.IMAGES_EDITS: images.EDIT_FIELDS,
    routes.IMAGES_VARIATIONS: images.VARIATION_FIELDS,
    routes.TOKENIZE: tokens.TOKENIZE_FIELDS,
    routes.DETOKENIZE: tokens.DETOKENIZE_FIELDS,
}
_OF_LMI = (*sorted(routes.LMI_ROUTES), *sorted(routes.TGI_ROUTES))
_ANSWERS: Mapping[str, type] = {
    **dict.fromkeys((routes.GENERATE, *sorted(routes.LMI_ROUTES)), WholeAnswer),
    routes.TOKENIZE: tokens.Tokens,
    routes.DETOKENIZE: tokens.Text,
}
# msgspec has no schema for unions, such as the tokens in details: the schema of these types ends at one level.
_FLAT = (WholeAnswer,)
_TYPES = tuple(
    kind
    for kind in (*_BODIES.values(), *dict.fromkeys(_ANSWERS.values()))
    if isinstance(kind, type) and kind not in _FLAT
)
_OBJECT: Schema = {"type": "object"}


def components() -> dict[str, Schema]:
    """Return the schemas that `request_schema` and `answer_schema` refer to."""
    _, found = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    return {**found, **{kind.__name__: _of_struct(kind) for kind in _FLAT}, "Parameters": _of_table(PARAMETERS)}


def request_schema(route: str) -> Schema:
    """Return the schema of the body of a request to this route."""
    if route in _OF_LMI:
        schema = _of_table(BODY)
        properties = {**schema["properties"], "parameters": {"$ref": "#/components/schemas/Parameters"}}
        return {**schema, "properties": properties, "required": ["inputs"]}
    body = _BODIES.get(route, _OBJECT)
    if isinstance(body, type):
        return _reference(body)
    table = {name: field for name, field in body.items() if isinstance(field, Field)}
    return _of_table(table) if table else dict(body)


def answer_schema(route: str) -> Schema:
    """Return the schema of an answer in JSON."""
    if route == routes.TGI:  # text-generation-inference's answer at its root is a list of one
        return {"type": "array", "items": _reference(WholeAnswer)}
    return _reference(_ANSWERS[route]) if route in _ANSWERS else _OBJECT


def _reference(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _of_struct(kind: type[msgspec.Struct]) -> Schema:
    known = {str: {"type": "string"}}
    return {
        "type": "object",
        "properties": {field.encode_name: known.get(field.type, {}) for field in msgspec.structs.fields(kind)},
    }


def _of_table(table: Mapping[str, Field]) -> Schema:
    """Return the schema of an object. Fields that are refused whatever they hold are left out."""
    kinds = {name: list(_kinds(name, field)) for name, field in table.items()}
    properties = {
        name: {"type": found[0] if len(found) == 1 else found} if found else {}
        for name, found in kinds.items()
        if found or table[name].target is not None
    }
    return {"type": "object", "properties": properties}


def _kinds(name: str, field: Field) -> Iterator[str]:
    numeric = False
    for kind, samples in _SAMPLES.items():
        if (kind != "integer" or not numeric) and any(_takes(field, name, sample) for sample in samples):
            numeric = kind == "number"
            yield kind


def _takes(field: Field, name: str, sample: Any) -> bool:
    try:
        field.read(name, sample)
    except RequestError:
        return False
    return True
