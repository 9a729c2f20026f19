"""Requests of optional dialects to handlers that read LMI's: they are translated, and so are the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.handler import RequestHandler, Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects.optional import StreamTranslation, optional_dialects

Outcomes = Sequence[Response | LmiServerError]
_TRANSLATIONS = optional_dialects().translations


def outcomes(handler: RequestHandler, requests: Sequence[Input]) -> Outcomes:
    """Return what the handler answers. Raises whatever the handler raises."""
    if handler.reads_tensors or _TRANSLATIONS.keys().isdisjoint(request.route for request in requests):
        return handler.handle(requests)
    parsed = [_read_request(request) for request in requests]
    accepted = [request for _, request in parsed if isinstance(request, Input)]
    answers = iter(handler.handle(accepted) if accepted else ())
    return [
        _write_outcome(sent.route, asked, next(answers), handler) if isinstance(request, Input) else request
        for sent, (asked, request) in zip(requests, parsed, strict=True)
    ]


def read(request: Input) -> tuple[Any, Input]:
    """Return what `write` takes, and the request of LMI: the request itself if its route is not translated.

    Raises RequestError.
    """
    translation = _TRANSLATIONS.get(request.route)
    return (None, request) if translation is None else translation.read(request)


def write(route: str, asked: Any, outcome: Response, model: str) -> Response:
    """Return the answer to a request that was translated; any other one as it is. Raises RequestError."""
    if asked is None or outcome.status != 200:
        return outcome
    translation = _TRANSLATIONS[route]
    if outcome.stream is None:
        headers, data = translation.write(asked, model, outcome.data)
        return msgspec.structs.replace(outcome, headers=headers, data=data)
    if translation.stream is None or not isinstance(outcome.stream, AsyncIterator):
        return outcome
    return msgspec.structs.replace(outcome, stream=_translate(outcome.stream, translation.stream(asked, model)))


def error(route: str, asked: Any, failure: LmiServerError) -> LmiServerError:
    """Return the error of a request that was translated, with the names of its own fields."""
    translation = _TRANSLATIONS.get(route)
    return failure if asked is None or translation is None else translation.error(asked, failure)


async def _translate(pieces: AsyncIterator[bytes], writer: StreamTranslation) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield writer.piece(piece)
        yield writer.end()
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            await close()


def _read_request(request: Input) -> tuple[Any, Input | LmiServerError]:
    try:
        return read(request)
    except LmiServerError as failure:
        return None, failure


def _write_outcome(
    route: str, asked: Any, outcome: Response | LmiServerError, handler: RequestHandler
) -> Response | LmiServerError:
    if isinstance(outcome, LmiServerError):
        return error(route, asked, outcome)
    try:
        return write(route, asked, outcome, handler.served_names[0])
    except LmiServerError as failure:
        return failure
