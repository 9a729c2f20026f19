"""Has a model answer one line, at its turn, and again if the server could not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from frontend.access.api_keys import TENANT
from frontend.batches.pace import Line, LinePace
from frontend.detached.request import DetachedRequest, KeptAnswer, receive_body
from frontend.http.clients import Inference, Scope, shown_error
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.http.protocol import scope_without_client
from frontend.relay.request import model_and_priority
from lmi_server.batches.lines import ROUTES, BatchLine, answer_line, is_answered
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.protocol import Error
from lmi_server.dialects.errors import error_reply
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.supervisor.job import ReplySlot

_PRIORITY = b"1000"  # far behind that of requests without one
_TRIES = 3  # if a worker dies or gets stuck over the line
_PAUSE_S = 1.0
_MEMORY = 256 << 20  # bytes of lines and of their answers
_FULL = f"the answers of batches take {_MEMORY} bytes; ask for fewer tokens"
_LATER = frozenset({"queue_full", "queue_delay", "model_not_ready", "rate_limit_exceeded"})
_AGAIN = frozenset({"worker_died", "predict_timeout", "no_room"})


class LineOutcome(NamedTuple):
    """The line of an answer, and whether it belongs into the output."""

    line: bytes
    is_answered: bool


class _ErrorBody(msgspec.Struct):
    code: str | None = None


class _WithError(msgspec.Struct):
    error: _ErrorBody


class Asking:
    """Sends the lines of batches to the models of one server. `infer` takes them without an API key."""

    def __init__(self, infer: Inference, models: ModelRegistry, pace: LinePace, id_header: str) -> None:
        self._infer = infer
        self._models = models
        self._pace = pace
        self._id_header = id_header.lower().encode()
        self._memory = MemoryBudget(_MEMORY, _FULL)

    async def hold(self, size: int) -> HeldBytes:
        """Return the memory for a line, once there is some; the caller releases it."""
        held = HeldBytes(self._memory)
        while not held.add(size) and self._memory.used > size:
            held.release()
            await asyncio.sleep(_PAUSE_S)
        return held

    async def answer(self, line: BatchLine, line_id: str, tenant: bytes) -> LineOutcome:
        """Return the answer to a line, however often it must be sent for that."""
        tries = 0
        while True:
            held = HeldBytes(self._memory)
            try:
                answer = await self._send(line, line_id, tenant, held)
                data = b"".join(answer.items)
                code = _error_code(data) if not is_answered(answer.status) else None
                tries += code in _AGAIN
                if answer.status and code not in _LATER and not (code in _AGAIN and tries < _TRIES):
                    text = answer_line(line_id, line.custom_id, answer.status, line_id, data)
                    return LineOutcome(text, is_answered(answer.status))
            finally:
                held.release()
            if answer.status:  # else it was taken back, and waits for its turn
                await asyncio.sleep(_PAUSE_S)

    async def _send(self, line: BatchLine, line_id: str, tenant: bytes, held: HeldBytes) -> KeptAnswer:
        """Return the answer at this try; its status is 0 if the line was taken back."""
        model = self._model(line)
        if model is None:  # which the relay refuses
            return await self._run(line, line_id, tenant, held, Line())
        async with self._pace.turn(model) as turn:
            answer = await self._run(line, line_id, tenant, held, turn)
            return (
                KeptAnswer() if turn.was_taken else answer
            )  # which may be a part: one in chunks begins before its end

    def _model(self, line: BatchLine) -> Model | None:
        """Return the model that is to answer, None if there is none."""
        models = self._models
        try:
            if models.only is not None:
                return models.only.choose(None)
            name, _ = model_and_priority(line.body)
            if name is not None and (models.default is None or models.has(name)):
                return models.named_as_model(name)
            return None if models.default is None else models.default.choose(None)
        except LmiServerError:
            return None

    async def _run(self, line: BatchLine, line_id: str, tenant: bytes, held: HeldBytes, turn: Line) -> KeptAnswer:
        request = _LineRequest(KeptAnswer(), held, turn)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(line.body)),
            (b"x-priority", _PRIORITY),
            (self._id_header, line_id.encode()),
        ]
        body = HeldBytes(self._memory)  # `hold` counts it
        scope = scope_without_client(line.url, headers, request, body)
        scope[TENANT] = tenant
        route = ROUTES[line.url]
        await request.run(self._infer, (route, None, None), scope, receive_body(line.body), body)
        return request.record if request.broken_by is None else _error_answer(route, request.broken_by, scope)


class _LineRequest(DetachedRequest):
    """A detached request whose turn may be taken back."""

    def __init__(self, record: KeptAnswer, answer: HeldBytes, turn: Line) -> None:
        super().__init__(record, answer)
        self._turn = turn
        self._reply = ReplySlot()

    @property
    def broken_by(self) -> LmiServerError | None:
        """Return the error that has ended an answer whose status was there already: what there is, is a part of it."""
        terminal = self._reply.terminal
        is_broken = self.record.status > 0 and is_answered(self.record.status)
        return terminal.exception() if isinstance(terminal, Error) and is_broken else None

    def watch(self, on_gone: Callable[[], None], reply: ReplySlot) -> None:
        super().watch(on_gone, reply)
        self._reply = reply
        self._turn.give_back = on_gone

    def unwatch(self) -> None:
        super().unwatch()
        self._turn.give_back = None


def _error_answer(route: str, error: LmiServerError, scope: Scope) -> KeptAnswer:
    status, headers, body = error_reply(route, shown_error(error, scope))
    return KeptAnswer(status, "", headers, [body])


def _error_code(data: bytes) -> str | None:
    try:
        return msgspec.json.decode(data, type=_WithError).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
