"""InvokeEndpointAsync of the SageMaker Runtime API: the request is read from S3, and its answer written there.

The setting `async_output_path` is what an endpoint's AsyncInferenceConfig has as S3OutputPath. A client may only name
inputs below `async_input_path`: they are read with the server's own credentials.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.responses import Response

from frontend.detached.request import DetachedRequest, KeptAnswer, receive_body
from frontend.http.clients import Inference, Receive, Scope
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.http.protocol import held_by
from frontend.http.responses import new_request_id
from frontend.sagemaker.settings import JobSettings
from frontend.storage.objects import StoreThreads
from frontend.storage.s3 import as_os_errors, aws_client
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import LmiServerError, ModelNotReadyError, NoRoomError, QueueFullError, RequestError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import routes
from lmi_server.dialects.errors import error_reply
from lmi_server.serving.pool.worker_pool import SHUTTING_DOWN

logger = logging.getLogger(__name__)

_PREFIX = b"x-amzn-sagemaker-"
_S3 = re.compile(r"s3://([^/]+)/?(.*)")
# The limits are those of the API.
_EXTENSION = re.compile(r"[a-zA-Z0-9!_.*'()/-]{1,512}")
_FILE_NAME = re.compile(r"(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9-_.]{0,31}")
_INFERENCE_ID = re.compile(r"[!-~][ -~]{0,63}")
_MAX_INLINE = 128_000  # bytes
_TIME_TO_LIVE = (60, 21_600, 21_600)  # seconds: min, max, default
_INVOCATION_TIMEOUT = (1, 3600, 900)
_THREADS = 16  # that read and write on S3
_LAST_ANSWERS_S = 0.1
_PAUSE_S = 1.0  # until a full queue is asked again


class _S3Object(NamedTuple):
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class _Invocation(NamedTuple):
    """One request: where its input is or the input itself, where output and failure go, and its times in seconds."""

    inference_id: str
    source: _S3Object | bytes
    output: _S3Object
    failure: _S3Object
    expires: float
    timeout: int


class AsyncInvocations:
    """Runs requests whose inputs and outputs are on S3, each as soon as a queue takes it."""

    def __init__(
        self,
        infer: Inference,
        check: Callable[[Scope], object] | None,
        settings: ServerSettings,
        answers: MemoryBudget,
    ) -> None:
        """`check` raises an LmiServerError for a request that may not use the models.

        `answers` is the memory for the answers until they are written.
        """
        self._infer = infer
        self._answers = answers
        self._check = check
        jobs = settings.part(JobSettings)
        self._capacity = jobs.memory_cache_capacity
        self._max_size = settings.max_request_size
        self._outputs = None if jobs.async_output_path is None else _parse_place(jobs.async_output_path)
        inputs = jobs.async_input_path or (None if self._outputs is None else f"s3://{self._outputs.bucket}")
        self._inputs = None if inputs is None else _parse_place(inputs)
        self._client: Any = None if self._outputs is None else aws_client("s3", "async_output_path")
        self._full = {429, 503, settings.throttle_error_http_code, settings.wlm_error_http_code}
        self._tasks: dict[asyncio.Task[None], str] = {}  # with the id of each invocation
        self._answering: set[asyncio.Task[KeptAnswer]] = set()  # those whose answer is not known yet
        self._draining = asyncio.Event()
        self._threads = StoreThreads(_THREADS, "s3")

    async def __call__(self, name: str | None, scope: Scope, receive: Receive) -> Response:
        """Take one request; `name` is that of the model. Raises LmiServerError."""
        if self._check is not None:
            self._check({**scope})
        if self._outputs is None:
            raise RequestError("asynchronous invocations are off; set async_output_path=s3://bucket/prefix")
        if len(self._tasks) >= self._capacity:
            raise QueueFullError(f"memory_cache_capacity={self._capacity} asynchronous invocations wait or run")
        body = await _inline_body(receive)
        invocation = self._read(dict(scope["headers"]), body, self._outputs)
        held = held_by(scope).another()
        held.reserve(len(body))
        task = asyncio.create_task(self._run(invocation, name, scope, held))
        self._tasks[task] = invocation.inference_id
        task.add_done_callback(self._tasks.pop)
        answer = Response(json.dumps({"InferenceId": invocation.inference_id}), HTTPStatus.ACCEPTED)
        answer.headers["content-type"] = "application/json"
        answer.headers["x-amzn-sagemaker-outputlocation"] = str(invocation.output)
        answer.headers["x-amzn-sagemaker-failurelocation"] = str(invocation.failure)
        return answer

    def drain(self) -> None:
        """Fail the requests that wait for a place: the queues take nothing more."""
        self._draining.set()

    async def finish(self) -> None:
        """Fail requests without an answer, and wait until all outputs are written."""
        if self._answering:  # some may have an answer that they have not read yet
            await asyncio.wait(self._answering, timeout=_LAST_ANSWERS_S)
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def give_up(self) -> None:
        """Log which outputs are not written; no client waits for them any more."""
        for inference_id in self._tasks.values():
            _log_loss(inference_id, "the server ends before it is written")

    def _read(self, headers: dict[bytes, bytes], body: bytes, outputs: _S3Object) -> _Invocation:
        given = {
            key[len(_PREFIX) :]: value.decode("latin-1") for key, value in headers.items() if key.startswith(_PREFIX)
        }
        inference_id = _match(given, "Inference-Id", _INFERENCE_ID) or new_request_id()
        extension = _match(given, "S3OutputPathExtension", _EXTENSION)
        folder = f"{outputs.key}/{extension}/" if extension else f"{outputs.key}/"
        name = _match(given, "Filename", _FILE_NAME) or new_request_id()
        stem, dot, ending = name.partition(".")
        begin = f"{folder}{stem}".strip("/")
        return _Invocation(
            inference_id,
            self._source(given.get(b"inputlocation"), body),
            _S3Object(outputs.bucket, f"{begin}{dot}{ending}" if dot else f"{begin}.out"),
            _S3Object(outputs.bucket, f"{begin}-error.out"),
            time.monotonic() + _seconds(given, "RequestTTLSeconds", _TIME_TO_LIVE),
            _seconds(given, "InvocationTimeoutSeconds", _INVOCATION_TIMEOUT),
        )

    def _source(self, location: str | None, body: bytes) -> _S3Object | bytes:
        if location is None:
            if not body:
                raise RequestError("InputLocation or a body is required")
            return body
        if body:
            raise RequestError("InputLocation and a body exclude each other; send one of them")
        found = _S3.fullmatch(location)
        place = None if found is None else _S3Object(*found.groups())
        assert self._inputs is not None
        if place is None or not _is_below(place, self._inputs):
            raise RequestError(
                f"InputLocation is {excerpt(location, 200)}; it must be below {self._inputs} (async_input_path)"
            )
        return place

    async def _run(self, invocation: _Invocation, name: str | None, scope: Scope, held: HeldBytes) -> None:
        """Run an invocation whose input counts in `held`."""
        answer = HeldBytes(self._answers)
        try:
            record = await self._outcome(invocation, name, scope, held, answer)
        finally:
            held.release()
        try:
            await self._write(invocation, record)
        finally:
            answer.release()

    async def _write(self, invocation: _Invocation, record: KeptAnswer) -> None:
        place = invocation.output if 200 <= record.status < 300 else invocation.failure
        content_type = next((value for key, value in record.headers if key.lower() == "content-type"), "text/plain")
        try:
            await self._threads.run(self._put, place, b"".join(record.items), content_type)
        except OSError as error:
            _log_loss(invocation.inference_id, error)

    async def _outcome(
        self, invocation: _Invocation, name: str | None, scope: Scope, held: HeldBytes, answer: HeldBytes
    ) -> KeptAnswer:
        answering = asyncio.create_task(self._answer(invocation, name, scope, held, answer))
        self._answering.add(answering)
        try:
            await asyncio.wait([answering])
            return answering.result()
        except asyncio.CancelledError:
            if not answering.cancelled():  # it is this task that is to end
                answering.cancel()
                raise
            return _refusal(ModelNotReadyError(SHUTTING_DOWN))
        except ModelNotReadyError as error:
            return _refusal(error)
        except (OSError, LmiServerError) as error:
            return KeptAnswer(status=500, items=[str(error).encode(errors="backslashreplace")])
        finally:
            self._answering.discard(answering)

    async def _answer(
        self, invocation: _Invocation, name: str | None, scope: Scope, held: HeldBytes, answer: HeldBytes
    ) -> KeptAnswer:
        source = invocation.source
        data = source if isinstance(source, bytes) else await self._input(source, held, invocation.expires)
        while True:
            answer.release()
            request = await self._invoke(data, invocation.timeout, name, scope, answer)
            has_ended = request.record.status not in self._full or request.has_no_room
            if has_ended or time.monotonic() >= invocation.expires:
                return request.record
            await self._pause()

    async def _input(self, place: _S3Object, held: HeldBytes, expires: float) -> bytes:
        """Return the object once there is room for it. Raises OSError, and NoRoomError if there is none in time."""
        while True:
            size, stream = await self._threads.run(self._open, place)
            try:
                held.reserve(size)
                return await self._threads.run(_read_whole, stream, place)
            except NoRoomError:
                if time.monotonic() >= expires:
                    raise
            finally:
                stream.close()
            await self._pause()

    async def _invoke(
        self, data: bytes, timeout_s: int, name: str | None, scope: Scope, answer: HeldBytes
    ) -> DetachedRequest:
        request = DetachedRequest(KeptAnswer(), answer)
        headers = _forward_headers(scope["headers"], len(data), timeout_s)
        forwarded, decoded = {**scope, "headers": headers}, held_by(scope).another()
        await request.run(self._infer, (routes.INVOCATIONS, name, None), forwarded, receive_body(data), decoded)
        return request

    async def _pause(self) -> None:
        """Wait before the next try. Raises ModelNotReadyError if the server ends, because no queue takes it then."""
        try:
            await asyncio.wait_for(self._draining.wait(), _PAUSE_S)
        except TimeoutError:
            return
        raise ModelNotReadyError(SHUTTING_DOWN)

    def _open(self, place: _S3Object) -> tuple[int, Any]:
        """Return the size of an object, and the stream of its bytes."""
        with as_os_errors(str(place)):
            found = self._client.get_object(Bucket=place.bucket, Key=place.key)
            size = found["ContentLength"]
            if size > self._max_size:
                found["Body"].close()
                raise OSError(f"{place} is longer than max_request_size={self._max_size} bytes")
            return size, found["Body"]

    def _put(self, place: _S3Object, data: bytes, content_type: str) -> None:
        with as_os_errors(str(place)):
            self._client.put_object(Bucket=place.bucket, Key=place.key, Body=data, ContentType=content_type)


def _read_whole(stream: Any, place: _S3Object) -> bytes:
    with as_os_errors(str(place)):
        return bytes(stream.read())


def _refusal(error: LmiServerError) -> KeptAnswer:
    status, headers, data = error_reply(routes.INVOCATIONS, error)
    return KeptAnswer(status=status, headers=headers, items=[data])


def _log_loss(inference_id: str, reason: object) -> None:
    logger.error("the answer of the asynchronous invocation %s is lost: %s", inference_id, reason)


async def _inline_body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the body has not arrived as a whole")
        body += message.get("body", b"")
        if len(body) > _MAX_INLINE:
            raise RequestError(
                f"the body is longer than {_MAX_INLINE} bytes; put it on S3, and name it as InputLocation"
            )
        if not message.get("more_body"):
            return body


def _forward_headers(headers: list[tuple[bytes, bytes]], length: int, timeout_s: int) -> list[tuple[bytes, bytes]]:
    """Return the headers that the container gets with the input: its type, and how long the answer may take."""
    given = dict(headers)
    changed = {b"content-length": b"%d" % length, b"x-request-timeout": b"%d" % timeout_s}
    if (content_type := given.get(_PREFIX + b"content-type")) is not None:
        changed[b"content-type"] = content_type
    dropped = {*changed, b"transfer-encoding", b"expect"}
    return [*(header for header in headers if header[0] not in dropped), *changed.items()]


def _parse_place(path: str) -> _S3Object:
    found = _S3.fullmatch(path)
    assert found is not None, "the settings are checked"
    return _S3Object(found[1], found[2].rstrip("/"))


def _is_below(place: _S3Object, parent: _S3Object) -> bool:
    """Return whether `place` has the whole of the parent's parts before its own."""
    return place.bucket == parent.bucket and (not parent.key or place.key.startswith(f"{parent.key}/"))


def _match(given: dict[bytes, str], name: str, pattern: re.Pattern[str]) -> str | None:
    value = given.get(name.lower().encode())
    if value is not None and (pattern.fullmatch(value) is None or ".." in value):
        raise RequestError(f"{name} is {excerpt(value)}; it must match {pattern.pattern}")
    return value


def _seconds(given: dict[bytes, str], name: str, limits: tuple[int, int, int]) -> int:
    min_s, max_s, default = limits
    text = given.get(name.lower().encode(), str(default))
    if not (text.isascii() and text.isdigit() and min_s <= int(text[:9]) <= max_s):
        raise RequestError(f"{name} is {excerpt(text)}; it takes an integer from {min_s} to {max_s}")
    return int(text)
