"""Requests to a handler that generates text: a dialect reads the request and writes the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from msgspec.structs import replace

from lmi_server.configuration.handlers import HANDLERS
from lmi_server.configuration.handlers import load as load_by_name
from lmi_server.configuration.options import ModelOptions
from lmi_server.contract.errors import EXITS, HandlerError, exit_message
from lmi_server.contract.generation import Delta, GenerationRequest
from lmi_server.contract.handler import LLMHandler, ModelInfo, Response
from lmi_server.contract.protocol import (
    AddAdapter,
    Command,
    GetMetrics,
    Input,
    RemoveAdapter,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from lmi_server.dialects import routes
from lmi_server.dialects.base import Exchange, ServedModel
from lmi_server.dialects.optional import optional_dialects
from lmi_server.dialects.vllm import tokens
from lmi_server.worker.answers.frame_buffer import ResponseWriter
from lmi_server.worker.handler_loading import Loading
from lmi_server.worker.processors.base import RequestProcessor, is_cancelled
from lmi_server.worker.processors.formats import Formats
from lmi_server.worker.processors.responses import send_response

if TYPE_CHECKING:
    from lmi_server.worker.processors.sessions import SessionRequests

logger = logging.getLogger(__name__)

_TOKEN_ROUTES = routes.TOKEN_ROUTES | optional_dialects().counts.keys()  # nothing is generated


class GenerationProcessor(RequestProcessor):
    """Parses requests, has an `LLMHandler` generate, and formats its deltas."""

    def __init__(self, handler: LLMHandler, loading: Loading) -> None:
        self._handler = handler
        self._loading = loading
        self._default_stops = loading.options.default_stops
        self._max_sequences = loading.options.max_rolling_batch_size  # of one request at once
        self._served: ServedModel | None = None  # once it is loaded
        self._began = False  # the handler has to stop, also if it could not load
        self._loading_late = asyncio.Lock()
        self._formats: Formats
        self._custom: CustomCode | None = None
        self._sessions: SessionRequests | None = None

    async def start(self) -> ModelInfo:
        options = self._loading.options
        self._formats = Formats(self._loading, self._handler)
        if options.has_sessions:
            self._sessions = _session_requests(options)
        self._custom = load_custom_handler(self._loading)
        if self._custom is not None and await self._custom.answers_load():
            return ModelInfo(max_model_len=0)  # a custom handler may have an engine of its own
        info = await self._load_model()
        # The model's own code would begin waiting requests, and the effects of a second attempt are unknown.
        return info if self._custom is None else replace(info, window=0)

    async def _load_model(self) -> ModelInfo:
        self._began = True
        info = await self._handler.start(self._loading.model_dir, self._loading.options)
        self._served = self._loading.served_model(info, self._handler.adapters)
        return info

    async def _ensure_loaded(self) -> ServedModel:
        """Return the model; load it if a custom handler has left that to the first request."""
        async with self._loading_late:
            if self._served is None:
                await self._load_model()
        assert self._served is not None
        return self._served

    async def stop(self) -> None:
        if self._sessions is not None:
            await asyncio.to_thread(self._sessions.save)
        if self._began:
            await self._handler.stop()

    async def control(self, command: Command) -> bytes:
        if self._served is None:
            await self._ensure_loaded()
        match command:
            case AddAdapter(adapter):
                await self._handler.add_adapter(self._formats.with_formatting(adapter))
            case RemoveAdapter(name):
                await self._handler.remove_adapter(name)
            case GetMetrics():
                return self._handler.metrics()
            case Sleep():
                await self._handler.sleep()
            case WakeUp():
                await self._handler.wake_up()
            case ResetPrefixCache(running, external):
                return b"true" if await self._handler.reset_prefix_cache(running, external) else b"false"
        return b""

    def stats(self) -> Mapping[str, float]:
        return {} if self._served is None else self._handler.stats()

    def note_waiting(self, requests: int) -> None:
        self._handler.note_waiting(requests)

    async def _answer(self, request: Input, writer: ResponseWriter) -> None:
        if await self._answer_session(request, writer):
            return
        if self._custom is not None and await self._answer_custom(self._custom, request, writer):
            return
        served = self._served or await self._ensure_loaded()
        if request.route in _TOKEN_ROUTES:
            writer.reply(200, [("content-type", "application/json")], await self._tokens(request, served))
            return
        exchange = await self._formats.parse_any(request, served)
        writer.format_error = exchange.error_chunk
        _log_warnings(request, exchange.warnings)
        if exchange.stream:
            await self._stream(exchange, writer)
        else:
            await self._generate(exchange, writer, _ignore)
            body = exchange.body()
            writer.reply(200, [("content-type", exchange.content_type), *exchange.headers], body)

    async def _answer_session(self, request: Input, writer: ResponseWriter) -> bool:
        """Answer a request that opens or closes a stateful session; return whether it was one.

        Raises LmiServerError if it names a session that does not exist.
        """
        sessions = self._sessions
        if sessions is None or not sessions.concerns(request):
            return False
        response = await asyncio.to_thread(sessions.answer, request)
        if response is not None:
            writer.reply(response.status, response.headers, response.data)
        return response is not None

    async def _answer_custom(self, custom: CustomCode, request: Input, writer: ResponseWriter) -> bool:
        """Send what the model's own code answers, if it does; return whether it did."""
        response = None if request.route in _TOKEN_ROUTES else await custom.answer(request)
        if response is not None:
            await send_response(response, writer)
        return response is not None

    async def _tokens(self, request: Input, served: ServedModel) -> bytes:
        """Return the body of an answer that contains tokens or their text; nothing is generated."""
        if request.route == routes.TOKENIZE:
            generation, warnings = tokens.parse_tokenize(request, served)
            _log_warnings(request, warnings)
            return tokens.tokens_body(await self._handler.tokenize(generation), served)
        if request.route != routes.DETOKENIZE:
            count = optional_dialects().counts[request.route]
            generation, warnings = count.parse(request, served)
            _log_warnings(request, warnings)
            return count.body(len(await self._handler.tokenize(generation)))
        ids, warnings = tokens.parse_detokenize(request, served)
        _log_warnings(request, warnings)
        return tokens.text_body(await self._handler.detokenize(ids))

    async def _stream(self, exchange: Exchange, writer: ResponseWriter) -> None:
        writer.open(200, [("content-type", exchange.content_type)], exchange.first())
        await self._generate(exchange, writer, writer.chunk)
        last = exchange.last()
        if last:
            writer.chunk(last)
        writer.end()

    async def _generate(self, exchange: Exchange, writer: ResponseWriter, emit: Callable[[bytes], None]) -> None:
        requests = exchange.requests
        if len(requests) == 1:
            await self._generate_one(exchange, 0, writer, emit)
            return
        # A request with a large `n` must not take every place of the engine at once: others have their turn.
        places = asyncio.Semaphore(self._max_sequences)

        exits: list[BaseException] = []

        async def generate_in_turn(index: int) -> None:
            async with places:
                try:
                    await self._generate_one(exchange, index, writer, emit)
                except EXITS as error:  # raised here it would end the loop before the request has its answer
                    exits.append(error)
                    raise HandlerError(exit_message(error)) from error

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(requests)):
                    group.create_task(generate_in_turn(index))
        except BaseExceptionGroup as failed:
            raise (exits or failed.exceptions)[0] from None

    def _with_default_stops(self, request: GenerationRequest) -> GenerationRequest:
        if not self._default_stops:
            return request
        stops = tuple(dict.fromkeys((*request.sampling.stop, *self._default_stops)))
        return replace(request, sampling=replace(request.sampling, stop=stops))

    async def _generate_one(
        self, exchange: Exchange, index: int, writer: ResponseWriter, emit: Callable[[bytes], None]
    ) -> None:
        """Generate the sequence `index` of `exchange`; `emit` gets the bytes that a stream sends for its deltas."""
        request = self._with_default_stops(exchange.requests[index])
        receiver = SequenceReceiver(exchange, index, writer, emit)
        try:
            await self._handler.deliver(request, receiver, None if writer.has_begun else writer.begin)
        except asyncio.CancelledError:
            # An engine's own library may raise it, for example when its connection breaks. That must not look as if the
            # client had gone away.
            if is_cancelled():
                raise
            raise HandlerError("the handler cancelled the request") from None
        receiver.count(request.adapter or "")


def _session_requests(options: ModelOptions) -> SessionRequests:
    from lmi_server.worker.processors.sessions import SessionRequests  # it needs djl_python, which only workers have

    return SessionRequests(options)


def _ignore(data: bytes) -> None:
    """An answer that does not stream keeps its text in the exchange."""


def _log_warnings(request: Input, warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("request %s: %s", request.request_id, warning)


class CustomCode(Protocol):
    """What `HandlerTable.custom_handler` loads."""

    async def answers_load(self) -> bool:
        """Have the code load its model; return whether the built-in handler need not load one."""

    async def answer(self, request: Input) -> Response | None:
        """Return the answer of the code; None if the built-in handler is to answer."""


def load_custom_handler(loading: Loading) -> CustomCode | None:
    """Return the function of the model's code; None if there is none, or if it is the handler itself.

    Raises ModelLoadError with file and line.
    """
    spec = HANDLERS.by_handler(loading.load.handler)
    if (spec is not None and spec.runs_user_code) or not Path(loading.model_dir, "model.py").is_file():
        return None
    load = cast("Callable[..., CustomCode | None]", load_by_name(HANDLERS.custom_handler))
    return load(loading.model_dir, loading.options)


class SequenceReceiver:
    """Takes the deltas of the sequence `index` of `exchange`; `emit` gets the bytes that a stream sends for them."""

    def __init__(self, exchange: Exchange, index: int, writer: ResponseWriter, emit: Callable[[bytes], None]) -> None:
        self._writer = writer
        self._times = _Times()
        self.take = _taker(self._times, exchange.add, index, writer, emit)

    def ready(self) -> Awaitable[None]:
        return self._caught_up() if self._writer.is_held else self._writer.buffer.yield_and_drain()

    async def _caught_up(self) -> None:
        await self._writer.wait_for_client()
        await self._writer.buffer.yield_and_drain()

    def count(self, adapter: str) -> None:
        """Count the sequence, which has ended. Raises HandlerError if it has no finish reason."""
        times = self._times
        if times.last is None or times.last.finish_reason is None:
            raise HandlerError("the handler ended a sequence without a finish reason")
        self._writer.tally.count(times.last.finish_reason, times.last.usage, times.first_at, times.last_at, adapter)


class _Times:
    """When a sequence began and ended, on the monotonic clock in seconds, and the delta that ended it."""

    last: Delta | None = None
    first_at = last_at = 0.0


def _taker(
    times: _Times, add: Callable[[int, Delta], bytes], index: int, writer: ResponseWriter, emit: Callable[[bytes], None]
) -> Callable[[Delta], bool]:
    """Return `DeltaReceiver.take`, which runs for each token.

    Variables of a function are read in less time than attributes. With this, and with fewer calls in LinesExchange and
    in `_turn`, a worker took 1.50 us of processor time a streamed token for 1.66 (`benchmarks.relay`, AMD Zen 4).
    """

    def take(delta: Delta) -> bool:
        writer.progressed = True
        if data := add(index, delta):
            emit(data)
        if delta.finish_reason is not None:
            times.last, times.last_at = delta, time.monotonic()
        if not times.first_at:
            times.first_at = time.monotonic()
        return not writer.is_held

    return take
