"""Requests of a dialect with tensors to handlers that read LMI's: translated on the way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.handler import RequestHandler, Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects.optional import optional_dialects

Outcomes = Sequence[Response | LmiServerError]
_TRANSLATIONS = optional_dialects().translations


def outcomes(handler: RequestHandler, requests: Sequence[Input]) -> Outcomes:
    """Return what the handler answers. Raises whatever the handler raises."""
    if handler.reads_tensors or _TRANSLATIONS.keys().isdisjoint(request.route for request in requests):
        return handler.handle(requests)
    read = [_read_request(request) for request in requests]
    accepted = [request for _, request in read if isinstance(request, Input)]
    answers = iter(handler.handle(accepted) if accepted else ())
    return [
        _write_outcome(sent.route, asked, next(answers), handler) if isinstance(request, Input) else request
        for sent, (asked, request) in zip(requests, read, strict=True)
    ]


def _read_request(request: Input) -> tuple[Any, Input | LmiServerError]:
    translation = _TRANSLATIONS.get(request.route)
    if translation is None:
        return None, request
    try:
        return translation.read(request)
    except LmiServerError as error:
        return None, error


def _write_outcome(
    route: str, asked: Any, outcome: Response | LmiServerError, handler: RequestHandler
) -> Response | LmiServerError:
    if asked is None or isinstance(outcome, LmiServerError) or outcome.stream is not None or outcome.status != 200:
        return outcome
    try:
        headers, data = _TRANSLATIONS[route].write(asked, handler.served_names[0], outcome.data)
    except LmiServerError as error:
        return error
    return msgspec.structs.replace(outcome, headers=headers, data=data)
