"""The constraint on the output of a request that has to call a tool."""

from __future__ import annotations

from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import GenerationRequest, NamedTool, StructuredOutputs

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def is_forced(request: GenerationRequest) -> bool:
    """Return whether the answer has to call a tool."""
    choice = request.chat.tool_choice
    return request.messages is not None and (choice == "required" or isinstance(choice, NamedTool))


def call_constraint(request: GenerationRequest) -> GenerationRequest:
    """Return `request` with a constraint: the arguments of the named function, or a list of calls.

    Raises RequestError if the request has another constraint.
    """
    if request.sampling.structured_outputs is not None:
        raise RequestError(
            "tool_choice and a constraint on the output (response_format, structured_outputs, guided_*) exclude each"
            " other if a tool must be called; leave one out"
        )
    constraint = StructuredOutputs(kind="json", value=_schema(request))
    sampling = msgspec.structs.replace(request.sampling, structured_outputs=constraint)
    return msgspec.structs.replace(request, sampling=sampling)


def _schema(request: GenerationRequest) -> dict[str, Any]:
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or _ANY_OBJECT for tool in request.tools or ()
    }
    choice = request.chat.tool_choice
    if isinstance(choice, NamedTool):
        return schemas[choice.name]
    calls = [_call(name, f"#/$defs/{index}") for index, name in enumerate(schemas)]
    at_most = {} if request.chat.parallel_tool_calls else {"maxItems": 1}
    parameters = {str(index): _relocate(schema, f"#/$defs/{index}") for index, schema in enumerate(schemas.values())}
    return {"type": "array", "minItems": 1, **at_most, "items": {"anyOf": calls}, "$defs": parameters}


def _call(name: str, parameters: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _relocate(schema: Any, root: str) -> Any:
    """Return `schema` with its references, which count from its own root, to where it is now: below `root`."""
    if isinstance(schema, list):
        return [_relocate(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _relocate(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
