"""Request dialects: pure functions between the bytes of HTTP and generation requests.

`parse` turns an Input into an Exchange: the sequences to generate, and the way to write the answer.

    lmi/, openai/, anthropic/, kserve/, speech/, tgi.py
                         one package or module per dialect
    optional.py          the dialects among these that are optional features
    vllm/                what vLLM adds to OpenAI's API
    routes.py            the names of the routes
    fields.py            reads and checks the fields of a body
    forms.py             the fields of a form
    parameters/          the parameters of generation that LMI and OpenAI share
    adapters.py          which LoRA adapter a request names
    errors.py            how an error reads in each dialect
    framing.py           JSON lines and server-sent events
    base.py              the interfaces: Exchange, Formatting, ServedModel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmi_server.contract.errors import RequestError, RouteNotFoundError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields, lmi, openai, routes
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.optional import optional_dialects

__all__ = ["FORMATTER_NAMES", "Exchange", "ServedModel", "parse"]

FORMATTER_NAMES = lmi.FORMATTER_NAMES
_OPTIONAL = optional_dialects()


Parser = Callable[[Input, dict[str, Any], ServedModel], Exchange]

_BY_ROUTE: dict[str, Parser] = {
    routes.CHAT_COMPLETIONS: openai.parse_chat,
    routes.COMPLETIONS: openai.parse_completion,
    routes.RESPONSES: openai.parse_response,
}


def parse(request: Input, served: ServedModel) -> Exchange:
    """Parse a request by its route. LMI's own routes take every dialect; the keys of the body decide there.

    Raises RequestError (or a subclass), whatever the body holds, and never anything else.
    """
    route = request.route
    parser = _BY_ROUTE.get(route)
    if parser is not None:
        return parser(request, fields.json_object(request), served)
    if route in routes.LMI_ROUTES:
        return _parse_any(request, served)
    optional = _OPTIONAL.parsers.get(route)
    if optional is not None:
        return optional(request, served)
    if route in routes.POOLING_ROUTES:
        raise RequestError(
            f"this model generates text and does not serve /{route}; serve a model of embeddings or classes,"
            " or set option.task=text-embedding"
        )
    if route in routes.IMAGE_ROUTES:
        raise RequestError(
            f"this model generates text and does not serve /v1/{route}; serve a pipeline of diffusers, which"
            " makes images"
        )
    raise RouteNotFoundError(f"no dialect serves the route {fields.show(route)}")


def _parse_any(request: Input, served: ServedModel) -> Exchange:
    """Parse a body of any dialect, by its type and its keys."""
    match fields.media_type(request):
        case "text/plain":
            return lmi.parse_text(request, served)
        case "text/csv":
            return lmi.parse_csv(request, served)
    body = fields.json_object(request)
    if served.async_service and body.get("prompt") is not None:  # that service looks for a prompt first
        return openai.parse_completion(request, body, served)
    # The order is LMI's: a body that has messages is a chat, whatever else it has.
    if body.get("messages") is not None:
        return openai.parse_chat(request, body, served)
    if body.get("inputs") is not None:
        return lmi.parse(request, body, served)
    if body.get("prompt") is not None:
        return openai.parse_completion(request, body, served)
    raise RequestError('inputs is missing; send {"inputs": "the prompt", "parameters": {...}}, or messages for a chat')
