"""Copies of requests for a new version: their answers go nowhere but into a comparison."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from frontend.canary.comparison import Compared, compare_answers
from frontend.canary.figures import AnswerOutcome, Figures, outcome_of
from frontend.http.clients import Send
from lmi_server.contract.errors import LmiServerError
from lmi_server.contract.protocol import Error, Input, Reply
from lmi_server.dialects.errors import error_reply
from lmi_server.serving.dispatch.sticky_sessions import may_have_files
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.job import Job
from lmi_server.verify.comparison import Pair

MAX_ANSWER = 1 << 18  # bytes of an answer that are compared; a longer one is not
_MAX_COPIES = 64  # at a time
_MAX_HELD = 1 << 26  # bytes of their requests: these outlive the requests that the front end counts


class SentAnswer:
    """The answer that a client gets, up to a bound, and when it was complete.

    `outcome` is None as long as there is no answer, and if the client has left before its end. `tenant` identifies the
    API key of the request. `on_refusal` is called at the end if the request was refused at once: none of the versions
    has had it then.
    """

    def __init__(self, tenant: bytes = b"") -> None:
        self.tenant = tenant
        self.on_refusal: Callable[[], None] | None = None
        self._has_begun = False
        self.data = bytearray()
        self.began = time.monotonic()
        self.seconds = 0.0
        self.outcome: AnswerOutcome | None = None
        self.ended: asyncio.Future[None] | None = None  # of the copy that waits for it

    def sending(self, send: Send) -> Send:
        """Return what takes down the answer that goes to `send`."""

        async def take(message: MutableMapping[str, Any]) -> None:
            self._has_begun = True
            if self.ended is not None and len(self.data) <= MAX_ANSWER:
                self.data += message.get("body", b"")[: MAX_ANSWER + 1]
            await send(message)

        return take

    def end(self) -> None:
        """Note that the request has ended, well or not."""
        self.seconds = time.monotonic() - self.began
        if self.on_refusal is not None and self._has_begun:
            self.on_refusal()
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


SENT: ContextVar[SentAnswer | None] = ContextVar("SENT", default=None)
"""The answer to the request that the running task serves, while any model has a new version tried."""


class Copies:
    """Has a new version answer copies of requests. No request waits for its copy; the number of copies is bounded."""

    def __init__(self, pool: WorkerPool, figures: Figures, compared: Compared) -> None:
        self._compared = compared
        self._pool = pool
        self._figures = figures
        self._tasks: set[asyncio.Task[None]] = set()
        self._comparing = asyncio.Lock()  # one at a time leaves the threads to others
        self._held = 0  # bytes of the requests that have copies

    def make(self, request: Input, session: bytes | None) -> None:
        """Make a copy of the request that the running task is about to serve, unless its session has had enough.

        No copy is made of what might change a session's files a second time.
        """
        sent, size = SENT.get(), len(request.body())
        is_full = len(self._tasks) >= _MAX_COPIES or self._held + size > _MAX_HELD
        is_unwanted = is_full or may_have_files(request) or not self._figures.has_room(session)
        if sent is None or sent.ended is not None or is_unwanted:
            self._compared.skipped += 1
            return
        sent.ended = asyncio.get_running_loop().create_future()
        try:
            job = self._pool.submit(request, _nothing)
        except LmiServerError:
            self._figures.add(AnswerOutcome.REFUSED, 0.0, session)
            return
        task = asyncio.create_task(self._follow(job, sent, session))
        self._tasks.add(task)
        self._held += size

        def end(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            self._held -= size

        task.add_done_callback(end)

    async def stop(self) -> None:
        """Drop the copies that run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, job: Job, sent: SentAnswer, session: bytes | None) -> None:
        try:
            answer = await _whole(job)
            seconds = time.monotonic() - job.queued_at
            terminal = job.reply.terminal
            outcome = outcome_of(_status(job), terminal)
            tokens = 0 if terminal is None or isinstance(terminal, Error) or not terminal.summary else (
                terminal.summary.output_tokens
            )  # fmt: skip
            assert sent.ended is not None
            if outcome is not AnswerOutcome.ERROR:  # which speaks for itself
                await sent.ended
            pair = await self._compare(sent, outcome, answer)
            if not self._figures.add(outcome, seconds / max(tokens, 1), session):
                return
            if pair is not None:
                self._compared.add(pair, seconds / max(sent.seconds, 1e-6), session)
            elif {sent.outcome, outcome} == {AnswerOutcome.SUCCESS, AnswerOutcome.REFUSED}:
                self._compared.add_refusal(session)
            else:
                self._compared.skipped += 1
        finally:
            self._pool.dispatcher.cancel(job)

    async def _compare(self, sent: SentAnswer, outcome: AnswerOutcome, answer: bytes) -> Pair | None:
        """Compare the answer that was sent with that to its copy; return None unless both are whole answers."""
        if {sent.outcome, outcome} != {AnswerOutcome.SUCCESS} or max(len(answer), len(sent.data)) > MAX_ANSWER:
            return None
        async with self._comparing:
            return await asyncio.to_thread(compare_answers, bytes(sent.data), answer)


async def _whole(job: Job) -> bytes:
    """Return an answer, up to a byte more than the bound, once it is complete."""
    data, reply = bytearray(), job.reply
    while True:
        await reply.wait()
        terminal, piece = reply.terminal, reply.take()
        data += piece[: max(MAX_ANSWER + 1 - len(data), 0)]
        if terminal is not None and not reply.unread:
            return bytes(data) + (terminal.data[: MAX_ANSWER + 1] if isinstance(terminal, Reply) else b"")
        if reply.is_held:
            job.release()


def _status(job: Job) -> int:
    terminal = job.reply.terminal
    if isinstance(terminal, Error):
        return error_reply(job.request.route, terminal.exception())[0]
    if isinstance(terminal, Reply):
        return terminal.status
    assert terminal is not None
    return job.reply.head.status if terminal.status == 200 and job.reply.head is not None else terminal.status


def _nothing() -> None:
    """Do nothing: a copy has no connection to close."""
