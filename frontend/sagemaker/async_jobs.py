"""Requests without a waiting client: they are answered at once with a token, under which their answers are read later.

The headers are DJL Serving's: `x-synchronous: false` starts a job, `x-starting-token` and `x-max-items` read its answer
in pages, and `x-next-token` of an answer names what follows. DELETE with `x-starting-token` ends a job.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.responses import Response

from frontend.detached.request import DetachedRequest, is_gone, process_name
from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.http.protocol import connection_of
from frontend.http.responses import error_response, json_response, new_request_id
from frontend.sagemaker.job_store import JobRecord, job_store
from frontend.sagemaker.settings import JobSettings
from frontend.storage.objects import StoreThreads
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import BadParameterError, LmiServerError, QueueFullError, WorkerDiedError
from lmi_server.contract.protocol import SYNCHRONOUS_HEADER
from lmi_server.contract.texts.quoting import excerpt

logger = logging.getLogger(__name__)
Answer = Callable[[Response, Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_SYNCHRONOUS = SYNCHRONOUS_HEADER.encode()
_STARTING_TOKEN, _MAX_ITEMS = b"x-starting-token", b"x-max-items"
_NAMES = frozenset({_SYNCHRONOUS, _STARTING_TOKEN, _MAX_ITEMS, _ATTRIBUTES})
_NEXT_TOKEN = "x-next-token"
_THREADS = 8  # that read and write in the store
_NOT_YET = "The model result is not yet available"  # LMI's words
_TOKEN = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(\d{0,9})")
_INTEGER = re.compile(r"-?\d{1,9}")


@dataclass
class _Job:
    """One job of this process.

    `was_read` is set once a client has read its answer to the end, `is_stored` once the store has it to the end.
    """

    token: str
    record: JobRecord
    request: DetachedRequest
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    was_read: bool = False
    is_stored: bool = False
    expiry: asyncio.TimerHandle | None = None


class AsyncJobs:
    """Answers requests that start a job, read its answer or end it; hands all others to `infer`.

    `answer` sends a response with the headers that every answer has. `check` raises an LmiServerError for a request
    that may not use the models. `answers` is the memory for the answers of jobs.
    """

    def __init__(
        self,
        infer: Inference,
        answer: Answer,
        check: Callable[[Scope], object] | None,
        settings: ServerSettings,
        answers: MemoryBudget,
    ) -> None:
        """Raise ConfigurationError if the settings for the store of answers cannot be used."""
        self._infer = infer
        self._answer = answer
        self._check = check
        jobs = settings.part(JobSettings)
        self._capacity = jobs.memory_cache_capacity
        self._answers = answers
        self._max_size = jobs.async_jobs_size
        self._lifetime = jobs.async_jobs_lifetime
        self._store = job_store(settings)
        self._threads = StoreThreads(_THREADS, "jobs")
        self._jobs: dict[str, _Job] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  # by token, until the answer is stored
        self._owner = process_name()

    def __call__(self, target: Target, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one inference request. Nearly all have none of these headers, and pay for this look only."""
        given = [header for header in scope["headers"] if header[0] in _NAMES]
        if not given:
            return self._infer(target, scope, receive, send)
        return self._serve(_own_headers(given), target, scope, receive, send)

    async def _serve(
        self, given: dict[bytes, bytes], target: Target, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = await self._response(given, target, scope, receive)
        if response is None:
            await self._infer(target, scope, receive, send)
        else:
            await self._answer(response, scope, receive, send)

    async def finish(self) -> None:
        """Wait until the jobs have ended and their answers are stored."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def give_up(self) -> None:
        """Log which answers are not stored; no client waits for them any more."""
        for token in self._running if self._store is not None else ():
            logger.error("the answer of job %s is lost: the server ends before it is stored", token)

    async def _response(
        self, given: dict[bytes, bytes], target: Target, scope: Scope, receive: Receive
    ) -> Response | None:
        """Return the response to a request about a job, None to any other."""
        text = given.get(_STARTING_TOKEN)
        try:
            if text is not None:
                return await self._about(text.decode("latin-1"), _max_items(given), scope)
            if given.get(_SYNCHRONOUS, b"").lower() == b"false":
                return await self._start(target, scope, receive)
        except LmiServerError as error:
            return error_response(target[0], error)
        return None

    async def _about(self, text: str, limit: int | None, scope: Scope) -> Response:
        if self._check is not None:
            self._check(scope)
        token, start = _parse_token(text)
        if scope["method"] == "DELETE":
            await self._end(token)
            return json_response({"status": "ended"})
        status, response = await self._page(token, start, limit)
        if status:
            connection_of(scope).set_reason(status)
        return response

    # --- jobs ---

    async def _start(self, target: Target, scope: Scope, receive: Receive) -> Response:
        self._make_room()
        record = JobRecord(owner=self._owner, expires=time.time() + self._lifetime)
        job = _Job(new_request_id(), record, DetachedRequest(record, HeldBytes(self._answers), self._forget_read))
        self._jobs[job.token] = job
        task = asyncio.create_task(self._run(job, target, scope, receive))
        self._running[job.token] = task
        task.add_done_callback(lambda _: self._running.pop(job.token))
        accepted = asyncio.create_task(job.request.accepted.wait())
        await asyncio.wait({accepted, task}, return_when=asyncio.FIRST_COMPLETED)
        accepted.cancel()
        if not job.request.accepted.is_set():  # no queue has it: the client reads why at once
            self._forget(job.token)
            return _build_response(record, record.items)
        await self._save(job)  # so that other servers know the token
        attributes = ("x-amzn-sagemaker-custom-attributes", f"{_NEXT_TOKEN}={job.token}")
        return _build_response(JobRecord(status=200, headers=[attributes]), [], job.token)

    async def _run(self, job: _Job, target: Target, scope: Scope, receive: Receive) -> None:
        record = job.record
        try:
            await job.request.run(self._infer, target, scope, receive)
        finally:
            record.finished = True
            record.expires = time.time() + self._lifetime
            if job.token not in self._jobs:
                job.request.answer.release()
            else:
                job.expiry = asyncio.get_running_loop().call_later(self._lifetime, self._forget, job.token)
                if job.request.accepted.is_set():
                    await self._save(job)

    async def _save(self, job: _Job) -> None:
        """Store what there is of the answer; the last call stores the whole."""
        if self._store is None:
            return
        async with job.saving:
            finished = job.record.finished
            try:
                await self._threads.run(self._store.save, job.token, job.record)
                job.is_stored = finished
            except OSError as error:
                logger.error("the answer of job %s is kept in memory alone: %s", job.token, error)

    def _make_room(self) -> None:
        """Forget answers if there are too many. Raises QueueFullError if too few may be forgotten."""
        self._forget_read()
        if self._is_full():
            raise QueueFullError(
                f"{len(self._jobs)} jobs are running or have answers that were not read (memory_cache_capacity="
                f"{self._capacity}, async_jobs_size={self._max_size} bytes); read or end some of them"
            )

    def _is_full(self) -> bool:
        return len(self._jobs) >= self._capacity or self._answers.used >= self._max_size

    def _forget_read(self) -> None:
        """Forget answers that were read to their end, the oldest first, until there is room.

        With a store all answers that are kept there may be forgotten here.
        """
        if not self._is_full():
            return
        for job in list(self._jobs.values()):
            if job.was_read or job.is_stored:
                self._forget(job.token)
                if not self._is_full():
                    return

    def _forget(self, token: str) -> _Job | None:
        """Forget a job of this process, and return it; None if there is none of that token."""
        job = self._jobs.pop(token, None)
        if job is not None:
            job.request.answer.release()
            if job.expiry is not None:
                job.expiry.cancel()
        return job

    async def _end(self, token: str) -> None:
        job = self._forget(token)
        if job is None and await self._load(token) is None:
            raise _unknown_token(token)
        if job is not None and job.request.cancel is not None:
            job.request.cancel()
        if self._store is not None:
            await self._threads.run(self._store.remove, token)

    # --- answers ---

    async def _page(self, token: str, start: int, limit: int | None) -> tuple[str, Response]:
        """Return the reason phrase and the response of a page that begins with item `start`, of at most `limit`."""
        job = self._jobs.get(token)
        record = await self._load(token) if job is None else job.record
        if record is None or record.expires < time.time():
            raise _unknown_token(token)
        items = record.items[start:] if limit is None else record.items[start : start + limit]
        end = start + len(items)
        is_last = record.finished and end >= len(record.items)
        if not items and not is_last:
            if job is None and is_gone(record.owner, self._owner):
                raise WorkerDiedError("the server ended while the job ran; send the request again")
            return _NOT_YET, _build_response(JobRecord(status=202), [], f"{token}{start or ''}")
        if job is not None and is_last:
            async with job.saving:  # a client that has seen the end may rely on the store, also if this server dies now
                job.was_read = True
        first = record if start == 0 else JobRecord(status=200, headers=_content_type(record))
        return first.reason, _build_response(first, items, None if is_last else f"{token}{end}")

    async def _load(self, token: str) -> JobRecord | None:
        if self._store is None:
            return None
        try:
            return await self._threads.run(self._store.load, token)
        except OSError as error:
            raise BadParameterError(f"Failed to lookup cache element: {error}") from error  # LMI's words


def _own_headers(headers: Headers) -> dict[bytes, bytes]:
    """Return the headers of this API, those among SageMaker's custom attributes too; a header wins."""
    given = dict(headers)
    for attribute in given.pop(_ATTRIBUTES, b"").split(b";"):
        name, separator, value = attribute.partition(b"=")
        if separator and (name := name.strip().lower()) in _NAMES:
            given.setdefault(name, value.strip())
    return given


def _parse_token(text: str) -> tuple[str, int]:
    """Return the job of a token and the number of the first item that is asked for."""
    found = _TOKEN.fullmatch(text)
    if found is None:
        raise _unknown_token(text[:60])
    return found[1], int(found[2] or 0)


def _max_items(given: dict[bytes, bytes]) -> int | None:
    """Return the most items of a page, None for all of them."""
    text = given.get(_MAX_ITEMS, b"-1").decode("latin-1").strip()
    if _INTEGER.fullmatch(text) is None:
        raise BadParameterError(f"Header x-max-items is {excerpt(text)}; send a number of items, negative for all")
    return None if int(text) < 0 else int(text)


def _unknown_token(token: str) -> BadParameterError:
    return BadParameterError(f"Invalid x-starting-token: {excerpt(token)}")  # LMI's words


def _content_type(record: JobRecord) -> list[tuple[str, str]]:
    return [header for header in record.headers if header[0].lower() == "content-type"]


def _build_response(record: JobRecord, items: list[bytes], next_token: str | None = None) -> Response:
    response = Response(b"".join(items), record.status or 500)
    length = [header for header in response.raw_headers if header[0] == b"content-length"]
    headers = [*record.headers, *([] if next_token is None else [(_NEXT_TOKEN, next_token)])]
    response.raw_headers = [*((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers), *length]
    return response
