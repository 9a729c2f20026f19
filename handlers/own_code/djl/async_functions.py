"""Serves with an asynchronous function of LMI's contract: it returns an Output, or yields one per piece of a stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

from djl_python.outputs import Output

from handlers.own_code.djl.adapters import AdapterFunctions, await_result
from handlers.own_code.djl.outputs import (
    body_of,
    chunk_fields,
    error_response,
    headers_of,
    piece_error,
    reason_of,
    respond,
)
from handlers.own_code.user_function import UserFunction
from lmi_server.contract.errors import EXITS, HandlerError, LmiServerError
from lmi_server.contract.handler import AsyncRequestHandler, Response
from lmi_server.contract.protocol import Adapter
from lmi_server.contract.protocol import Input as Request

_TRACKING_ID = "request_tracking_id"
"""A property of requests and a header of answers, by which LMI's Python process tells asynchronous requests apart."""


class AsyncFunction(AsyncRequestHandler):
    """Calls the function for each request, concurrently. A function that is not asynchronous delays the others."""

    def __init__(self, function: UserFunction, adapters: AdapterFunctions) -> None:
        self._function = function
        self._adapters = adapters

    async def start(self) -> None:
        output = await await_result(self._function.load())
        if not isinstance(output, AsyncIterator):
            self._function.check_loaded(output)
            return
        async for item in output:  # a function that yields its answers also yields from the call for loading the model
            self._function.check_loaded(item)

    async def add_adapter(self, adapter: Adapter) -> str:
        return await self._adapters.add_awaited(adapter)

    async def remove_adapter(self, name: str) -> str:
        return await self._adapters.remove_awaited(name)

    async def handle(self, request: Request) -> Response:
        try:
            tracked = {_TRACKING_ID: str(uuid.uuid4())}  # clients choose the ids of requests: two may be the same
            result = await await_result(self._function.call(self._function.inputs.one(request, **tracked)))
            response = await response_of(result)
            if isinstance(result, Output | AsyncIterator):
                response.headers = [*response.headers, *tracked.items()]
            return response
        except (asyncio.CancelledError, *EXITS):
            raise  # the worker knows if it has cancelled the request, and how a process ends
        except BaseException as error:  # noqa: BLE001 - the border to the user's code; `failure` logs it
            outcome = self._function.failure(request, error)
        if isinstance(outcome, LmiServerError):
            raise outcome
        return outcome


async def response_of(result: Any) -> Response:
    """Return the answer that the result of a function means: an Output, or an asynchronous iterator of them."""
    return await _stream_answer(result) if isinstance(result, AsyncIterator) else _whole(result)


class _Piece(NamedTuple):
    """One piece of an answer. `error` is the message if the piece reports a failure."""

    output: Output
    data: bytes
    last: bool
    error: str | None = None
    code: int = 424


def _piece(item: Any) -> _Piece:
    """Return what the function yielded as a piece. Raises HandlerError if it is not an Output, a text or bytes."""
    if isinstance(item, str | bytes | bytearray):
        return _Piece(Output(), item.encode() if isinstance(item, str) else bytes(item), last=False)
    if not isinstance(item, Output):
        raise HandlerError(f"Invalid output type: {type(item)}")
    fields = chunk_fields(item)
    if fields is None:
        error = None if item.code < 300 else body_of(item).decode(errors="replace") or item.message
        return _Piece(item, body_of(item), error is not None, error, item.code)
    error = fields.get("error")
    code = int(fields.get("code", 424 if error is not None else 200))
    failed = error is not None or code >= 300
    return _Piece(item, fields["data"].encode(), fields.get("last") == "True", (error or "") if failed else None, code)


def _whole(result: Any) -> Response:
    if not isinstance(result, Output) or result.code >= 300 or chunk_fields(result) is None:
        return respond(result)
    piece = _piece(result)
    return _alone(piece)


def _alone(piece: _Piece) -> Response:
    """Return the answer that consists of `piece` alone."""
    if piece.error is not None:
        return piece_error(piece.error, piece.code, headers_of(piece.output.properties))
    output = piece.output
    return Response(
        status=piece.code if piece.code in range(200, 300) else 200,
        headers=headers_of(output.properties),
        data=piece.data,
        after=output.execute_finalize,
        reason=reason_of(output),
    )


async def _stream_answer(items: AsyncIterator[Any]) -> Response:
    """Return the answer that `items` make.

    HTTP sends status and headers before the body, so the function waits for the first item that has data or headers.
    """
    async for item in items:
        piece = _piece(item)
        if piece.error is not None or piece.last:
            await _close(items)  # what the function would yield after the end is dropped
            return _alone(piece)
        if piece.data or piece.output.properties:
            headers = headers_of(piece.output.properties)
            reason = reason_of(piece.output)
            return Response(status=piece.output.code, headers=headers, stream=_rest(piece, items), reason=reason)
        piece.output.execute_finalize()
    return error_response("the handler yielded nothing; yield at least one Output")


async def _rest(first: _Piece, items: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:
    try:
        yield first.data
        first.output.execute_finalize()
        async for item in items:
            piece = _piece(item)
            if piece.error is not None:
                raise HandlerError(piece.error, piece.code)
            yield piece.data
            piece.output.execute_finalize()
            if piece.last:
                return
    finally:
        await _close(items)


async def _close(items: AsyncIterator[Any]) -> None:
    if isinstance(items, AsyncGenerator):
        await items.aclose()
