"""Requests to a handler that reads the request and writes the answer itself."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator

from lmi_server.contract.errors import EXITS, LmiServerError
from lmi_server.contract.handler import BURST, AsyncRequestHandler, ModelInfo, Response
from lmi_server.contract.protocol import AddAdapter, Command, Input, RemoveAdapter
from lmi_server.worker.answers.frame_buffer import ResponseWriter
from lmi_server.worker.processors import translation
from lmi_server.worker.processors.base import RequestProcessor, unsupported_error

logger = logging.getLogger(__name__)


class ResponseProcessor(RequestProcessor):
    """Sends what an `AsyncRequestHandler` returns."""

    def __init__(self, handler: AsyncRequestHandler, info: ModelInfo, model: str) -> None:
        """`model` is the name of the model in answers that are translated."""
        self._handler = handler
        self._info = info
        self._model = model
        self._running: dict[int, ResponseWriter] = {}  # by the identity of the request
        handler.note_progress = self._note_progress

    async def start(self) -> ModelInfo:
        await self._handler.start()
        return self._info

    async def _answer(self, request: Input, writer: ResponseWriter) -> None:
        asked, read = translation.read(request) if not self._handler.reads_tensors else (None, request)
        self._running[id(read)] = writer
        try:
            response = await self._handler.handle(read)
        except LmiServerError as error:
            writer.fail(translation.error(request.route, asked, error))
            return
        finally:
            del self._running[id(read)]
        await send_response(translation.write(request.route, asked, response, self._model), writer)

    def _note_progress(self, request: Input) -> None:
        writer = self._running.get(id(request))
        if writer is not None:
            writer.progressed = True

    async def control(self, command: Command) -> bytes:
        match command:
            case AddAdapter(adapter):
                return (await self._handler.add_adapter(adapter)).encode()
            case RemoveAdapter(name):
                return (await self._handler.remove_adapter(name)).encode()
        raise unsupported_error(command)

    async def stop(self) -> None:
        await self._handler.stop()


async def send_response(response: Response, writer: ResponseWriter) -> None:
    """Send an answer, piece by piece if it is a stream, then `call_after`. Raises whatever the stream raises."""
    try:
        if response.stream is None:
            writer.reply(response.status, response.headers, response.data, response.reason, response.error)
            return
        writer.open(response.status, response.headers, reason=response.reason)
        await _relay_pieces(response, writer)
        writer.end()
    finally:
        call_after(response)


async def _relay_pieces(response: Response, writer: ResponseWriter) -> None:
    burst = BURST
    pieces = response.stream
    assert isinstance(pieces, AsyncIterator), "an AsyncRequestHandler streams with an asynchronous iterator"
    try:
        async for piece in pieces:
            writer.progressed = True
            if piece:
                writer.chunk(piece)
            if writer.is_held:
                await writer.wait_for_client()
            burst -= 1
            if not burst:
                burst = BURST
                await writer.buffer.yield_and_drain()
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


def call_after(response: Response) -> None:
    """Call what the handler wants to do once its answer is on its way."""
    if response.after is None:
        return
    try:
        response.after()
    except EXITS:
        raise
    except BaseException:  # the border to handlers: the answer is on its way
        logger.exception("the handler raised in Response.after")
