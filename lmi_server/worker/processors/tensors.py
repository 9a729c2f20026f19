"""Requests of the Open Inference Protocol to handlers that read LMI's: translated on the way in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.handler import RequestHandler, Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects import kserve, routes

Outcomes = Sequence[Response | LmiServerError]


def outcomes(handler: RequestHandler, requests: Sequence[Input]) -> Outcomes:
    """Return what the handler answers. Raises whatever the handler raises."""
    if handler.reads_tensors or all(request.route != routes.INFER for request in requests):
        return handler.handle(requests)
    read = [_read_request(request) for request in requests]
    accepted = [request for _, request in read if isinstance(request, Input)]
    answers = iter(handler.handle(accepted) if accepted else ())
    return [
        _write_outcome(asked, next(answers), handler) if isinstance(request, Input) else request
        for asked, request in read
    ]


def _read_request(request: Input) -> tuple[Any, Input | LmiServerError]:
    if request.route != routes.INFER:
        return None, request
    try:
        return kserve.as_lmi_request(request)
    except LmiServerError as error:
        return None, error


def _write_outcome(
    asked: Any, outcome: Response | LmiServerError, handler: RequestHandler
) -> Response | LmiServerError:
    if asked is None or isinstance(outcome, LmiServerError) or outcome.stream is not None or outcome.status != 200:
        return outcome
    try:
        headers, data = kserve.as_tensors(asked, handler.served_names[0], outcome.data)
    except LmiServerError as error:
        return error
    return msgspec.structs.replace(outcome, headers=headers, data=data)
