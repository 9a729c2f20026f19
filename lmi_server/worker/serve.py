"""One request in the worker: parse it, let the handler generate, write the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from lmi_server.contract.errors import HandlerError, LmiServerError, ModelMemoryError, is_out_of_memory
from lmi_server.contract.generation import GenerationRequest
from lmi_server.contract.handler import AsyncRequestHandler, LLMHandler, Response
from lmi_server.contract.protocol import CANCELLED, Input
from lmi_server.dialects import routes, tokens
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.errors import error_reply
from lmi_server.worker.outbox import Answer, Outbox

logger = logging.getLogger(__name__)

_BURST = 8  # deltas that a sequence which never waits may hand out before the others have their turn


Parse = Callable[[Input, ServedModel], Exchange]
"""Reads a request: `dialects.parse`, or what the code of a model or an adapter has in its place."""


class Engine(NamedTuple):
    """The handler, and how many sequences of one request it gets at once, so that others have their turn."""

    handler: LLMHandler
    max_sequences: int


async def serve(
    request: Input, parse: Parse, engine: Engine, served: ServedModel, answer: Answer, outbox: Outbox
) -> None:
    """Answer `request`; `answer` has ended exactly once when this returns, whatever the handler raises."""
    exchange: Exchange | None = None
    try:
        if request.route in routes.TOKEN_ROUTES:
            answer.reply(200, [("content-type", "application/json")], await _tokens(request, engine.handler, served))
            return
        exchange = parse(request, served)
        _log_warnings(request, exchange.warnings)
        if exchange.stream:
            await _stream(exchange, engine, answer, outbox)
        else:
            await _generate(exchange, engine, answer, outbox, _ignore)
            answer.reply(200, [("content-type", exchange.content_type)], exchange.body())
    except asyncio.CancelledError:
        answer.error(CANCELLED, "cancelled by the front end")
    except LmiServerError as error:
        _fail(request, exchange, answer, error)
    except Exception as error:  # the border to handlers and engines, which raise anything; the request ends with it
        logger.exception("request %s: the handler raised", request.request_id)
        _fail(request, exchange, answer, HandlerError(f"{type(error).__name__}: {error}"))


async def _tokens(request: Input, handler: LLMHandler, served: ServedModel) -> bytes:
    """Return the body of an answer that tells tokens or their text; nothing is generated."""
    if request.route == routes.TOKENIZE:
        asked, warnings = tokens.parse_tokenize(request, served)
        _log_warnings(request, warnings)
        return tokens.tokens_body(await handler.tokenize(asked), served)
    ids, warnings = tokens.parse_detokenize(request, served)
    _log_warnings(request, warnings)
    return tokens.text_body(await handler.detokenize(ids))


async def serve_response(request: Input, handler: AsyncRequestHandler, answer: Answer, outbox: Outbox) -> None:
    """Answer `request` as `serve` does, with what the handler itself makes of it."""
    response: Response | None = None
    try:
        response = await handler.handle(request)
        if response.stream is None:
            answer.reply(response.status, response.headers, response.data)
        else:
            answer.open(response.status, response.headers, b"")
            await _relay_pieces(response, answer, outbox)
            answer.end()
    except asyncio.CancelledError:
        if _is_cancelled():
            answer.error(CANCELLED, "cancelled by the front end")
        else:
            _fail_response(request, answer, HandlerError("the handler cancelled the request"))
    except LmiServerError as error:
        _fail_response(request, answer, error)
    except Exception as error:  # the border to handlers, which raise anything; the request ends with it
        logger.exception("request %s: the handler raised", request.request_id)
        message = f"{type(error).__name__}: {error}"
        failure = ModelMemoryError(message) if is_out_of_memory(error) else HandlerError(message)
        _fail_response(request, answer, failure)
    finally:
        if response is not None:
            finish(response)


async def _relay_pieces(response: Response, answer: Answer, outbox: Outbox) -> None:
    burst = _BURST
    pieces = response.stream
    assert isinstance(pieces, AsyncIterator), "an AsyncRequestHandler streams with an asynchronous iterator"
    try:
        async for piece in pieces:
            answer.progressed = True
            if piece:
                answer.chunk(piece)
            burst -= 1
            if not burst:
                burst = _BURST
                await outbox.breathe()
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


def _fail_response(request: Input, answer: Answer, error: LmiServerError) -> None:
    if answer.started:
        answer.error(error.kind, error.message)
    else:
        answer.reply(*error_reply(request.route, error))


def finish(response: Response) -> None:
    """Do what a handler does once its answer is on its way."""
    if response.after is None:
        return
    try:
        response.after()
    except Exception:  # the border to handlers: the answer is on its way
        logger.exception("what the handler does after its answer raised")


async def _stream(exchange: Exchange, engine: Engine, answer: Answer, outbox: Outbox) -> None:
    answer.open(200, [("content-type", exchange.content_type)], exchange.first())
    await _generate(exchange, engine, answer, outbox, answer.chunk)
    last = exchange.last()
    if last:
        answer.chunk(last)
    answer.end()


async def _generate(
    exchange: Exchange, engine: Engine, answer: Answer, outbox: Outbox, emit: Callable[[bytes], None]
) -> None:
    requests = exchange.requests
    if len(requests) == 1:
        await _generate_one(exchange, 0, requests[0], engine.handler, answer, outbox, emit)
        return
    places = asyncio.Semaphore(engine.max_sequences)

    async def generate_in_turn(index: int, request: GenerationRequest) -> None:
        async with places:
            await _generate_one(exchange, index, request, engine.handler, answer, outbox, emit)

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(generate_in_turn(index, request))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _generate_one(
    exchange: Exchange,
    index: int,
    request: GenerationRequest,
    handler: LLMHandler,
    answer: Answer,
    outbox: Outbox,
    emit: Callable[[bytes], None],
) -> None:
    finished = False
    burst = _BURST
    add = exchange.add
    try:
        async with aclosing(handler.generate(request)) as deltas:
            async for delta in deltas:
                answer.progressed = True
                data = add(index, delta)
                if data:
                    emit(data)
                if delta.finish_reason is not None:
                    finished = True
                burst -= 1
                if not burst:
                    burst = _BURST
                    await outbox.breathe()
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        raise HandlerError("the handler cancelled the request") from None
    if not finished:
        raise HandlerError("the handler ended a sequence without a finish reason")


def _is_cancelled() -> bool:
    """Tell whether this task was asked to end; a handler may raise CancelledError of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _ignore(data: bytes) -> None:
    """An answer that does not stream keeps its text in the exchange."""


def _fail(request: Input, exchange: Exchange | None, answer: Answer, error: LmiServerError) -> None:
    if exchange is None or not answer.started:
        answer.reply(*error_reply(request.route, error))
        return
    data = exchange.error_chunk(error)
    if data:
        answer.chunk(data)
    answer.end(error_reply(request.route, error)[0])


def _log_warnings(request: Input, warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("request %s: %s", request.request_id, warning)
