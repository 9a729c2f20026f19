"""Request dialects: pure functions between the bytes of HTTP and generation requests.

`parse` makes an Exchange of an Input: what to generate, and how to write the answer.
"""

from __future__ import annotations

from lmi_server.contract.errors import RequestError, RouteNotFoundError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields, lmi, openai
from lmi_server.dialects.base import Exchange, ServedModel

__all__ = ["FORMATTER_NAMES", "Exchange", "ServedModel", "parse"]

FORMATTER_NAMES = lmi.FORMATTER_NAMES

_POOLING_ROUTES = frozenset({"embeddings", "score", "rerank"})
_LMI_ROUTES = frozenset({"invocations", "predictions"})


def parse(request: Input, served: ServedModel) -> Exchange:
    """Parse a request by its route; LMI's own routes take every dialect and tell them apart by the body's keys.

    Raises RequestError (or a subclass), never anything else, whatever the body holds.
    """
    if request.route == "chat/completions":
        return openai.parse_chat(request, fields.json_object(request), served)
    if request.route == "completions":
        return openai.parse_completion(request, fields.json_object(request), served)
    if request.route == "responses":
        return openai.parse_response(request, fields.json_object(request), served)
    if request.route in _POOLING_ROUTES:
        raise RequestError(
            f"the model generates text, which /{request.route} is not for; it takes a model of embeddings or"
            " classes, or option.task=text-embedding"
        )
    if request.route not in _LMI_ROUTES:
        raise RouteNotFoundError(f"no dialect serves the route {fields.show(request.route)}")
    if fields.media_type(request) == "text/plain":
        return lmi.parse_text(request, served)
    return _by_keys(request, served)


def _by_keys(request: Input, served: ServedModel) -> Exchange:
    body = fields.json_object(request)
    if body.get("messages") is not None:
        return openai.parse_chat(request, body, served)
    if body.get("inputs") is not None:
        return lmi.parse(request, body, served)
    if body.get("prompt") is not None:
        return openai.parse_completion(request, body, served)
    raise RequestError('inputs is missing; send {"inputs": "the prompt", "parameters": {...}}, or messages for a chat')
