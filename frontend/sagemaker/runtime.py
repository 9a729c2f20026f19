"""The API of a SageMaker endpoint for its clients: boto3's `sagemaker-runtime` talks to this server.

The paths, headers and errors are those of InvokeEndpoint, InvokeEndpointWithResponseStream and InvokeEndpointAsync in
Amazon's reference of the SageMaker Runtime API; the stream is in the event stream encoding of Amazon's SDKs. Signatures
are checked if `sigv4_keys` is set.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from frontend.http.clients import Inference, Receive, Scope, Send
from frontend.sagemaker.async_invocations import AsyncInvocations
from frontend.sagemaker.request_signatures import SignatureCheck, SignatureRefusedError
from lmi_server.contract.errors import (
    AuthenticationError,
    LmiServerError,
    ModelNotFoundError,
    ModelNotReadyError,
    NoRoomError,
    PermissionDeniedError,
    QueueFullError,
)
from lmi_server.dialects import routes
from lmi_server.serving.models.registry import ModelRegistry

Headers = list[tuple[bytes, bytes]]

ENDPOINTS = "/endpoints/"
_INVOKE = "invocations"
_INVOKE_STREAM = "invocations-response-stream"
_INVOKE_LATER = "async-invocations"
_ACTIONS = (_INVOKE, _INVOKE_STREAM, _INVOKE_LATER)
PATHS = {f"{ENDPOINTS}{{endpoint}}/{action}": routes.INVOCATIONS for action in _ACTIONS}
"""The paths for inference, each with its route."""

STREAM_PATH = f"{ENDPOINTS}{{endpoint}}/{_INVOKE_STREAM}"
STREAM_TYPE = "application/vnd.amazon.eventstream"
_EVENT_STREAM = STREAM_TYPE.encode()

_PATH = re.compile(rf"{ENDPOINTS}([^/]+)/({'|'.join(_ACTIONS)})")
_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_COMPONENT = b"x-amzn-sagemaker-inference-component"
_ADAPTER = b"x-amzn-sagemaker-adapter-identifier"
_ACCEPT = b"x-amzn-sagemaker-accept"
_ARCHIVE = ".tar.gz"
_VARIANT = (b"x-amzn-invoked-production-variant", b"AllTraffic")
_SEPARATORS = {b"text/event-stream": b"\n\n", b"application/jsonlines": b"\n"}
_OF_THE_WHOLE = frozenset({b"content-type", b"content-length"})
# The platform's refusals before a request reaches a model, by this server's type of error, with their status.
_REFUSED = {
    "ModelNotFoundException": ("ValidationError", 400),
    "UnauthorizedException": ("AccessDeniedException", 403),
    "ForbiddenException": ("AccessDeniedException", 403),
    "ThrottlingException": ("ThrottlingException", 429),
}
_KINDS = {
    AuthenticationError: ("AccessDeniedException", 403),
    PermissionDeniedError: ("AccessDeniedException", 403),
    NoRoomError: ("ServiceUnavailable", 503),
    QueueFullError: ("ServiceUnavailable", 503),
}
_MODEL_ERROR = 424
_SIGNING = frozenset({b"x-amz-date", b"x-amz-security-token", b"x-amz-content-sha256"})
_STRING = 7  # the type of a header's value in an event


class SageMakerRuntime:
    """Answers the requests of one server's models as their endpoints would."""

    def __init__(
        self,
        models: ModelRegistry,
        infer: Inference,
        invocations: AsyncInvocations,
        answer: Callable[[Response, Scope, Receive, Send], Awaitable[None]],
        signatures: SignatureCheck | None = None,
    ) -> None:
        """`answer` sends a response with the headers that every answer has; `signatures` is None if all are taken."""
        self._models = models
        self._infer = infer
        self._invocations = invocations
        self._answer = answer
        self._signatures = signatures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the request; return False if its path or its method is not one of this API."""
        found = _PATH.fullmatch(scope["path"])
        if found is None or scope["method"] != "POST":
            return False
        if self._signatures is not None:
            try:
                receive = await self._signatures(scope, receive)
            except LmiServerError as error:
                await self._answer(_refuse(error), scope, receive, send)
                return True
        endpoint, action = found.groups()
        name = self._model(endpoint, scope)
        if action == _INVOKE_LATER:
            await self._answer(await self._later(name, scope, receive), scope, receive, send)
        else:
            answer = _EventStream(send) if action == _INVOKE_STREAM else _Answer(send)
            await self._infer((routes.INVOCATIONS, name, None), scope, receive, answer)
        return True

    async def _later(self, name: str | None, scope: Scope, receive: Receive) -> Response:
        try:
            return await self._invocations(name, scope, receive)
        except LmiServerError as error:
            return _refuse(error)

    def _model(self, endpoint: str, scope: Scope) -> str | None:
        """Return the name of the model, None for the one of requests without a name.

        An endpoint with several models names one by its archive, as in "name.tar.gz". An inference component is a model
        or an adapter. The endpoint itself need not be known here: any name will do.
        """
        scope["headers"] = _forward_headers(scope["headers"])
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if _TARGET_MODEL in headers:
            return headers[_TARGET_MODEL].decode("latin-1").strip("/").removesuffix(_ARCHIVE)
        if _COMPONENT in headers:
            return self._component(headers[_COMPONENT].decode("latin-1"), scope)
        return endpoint if endpoint in self._models.names else None

    def _component(self, name: str, scope: Scope) -> str:
        try:
            model = self._models.named_as_model(name).name
        except (ModelNotFoundError, ModelNotReadyError):
            return name  # which the relay refuses
        if model != name:
            scope["headers"] = [*scope["headers"], (_ADAPTER, name.encode("latin-1"))]
        return model


def _refuse(error: LmiServerError) -> Response:
    kind, status = _KINDS.get(type(error), ("ValidationError", 400))
    if isinstance(error, SignatureRefusedError):
        kind, status = error.error_type, 403
    return Response(json.dumps({"Message": error.message}), status, {"x-amzn-errortype": kind}, "application/json")


def _forward_headers(headers: Headers) -> Headers:
    """Return the headers as the platform hands them to a container: without the signature, and with `accept`."""
    accept = dict(headers).get(_ACCEPT)
    kept = [
        (name, value)
        for name, value in headers
        if name not in _SIGNING
        and not (name == b"authorization" and value.startswith(b"AWS4-"))
        and not (name == b"accept" and accept)
    ]
    return [*kept, (b"accept", accept)] if accept else kept


class _Answer:
    """Passes the answer of a model on, or tells of its error as the platform does. It is what ASGI calls `send`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._failed: int | None = None
        self._headers: Headers = []
        self._body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 300:
            self._failed, self._headers = message["status"], message["headers"]
        elif self._failed is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._fail(self._failed)
        elif message["type"] == "http.response.start":
            await self._send({**message, "headers": [*self._begin(message["headers"]), _VARIANT]})
        else:
            await self._continue(message)

    def _begin(self, headers: Headers) -> Headers:
        return headers

    async def _continue(self, message: MutableMapping[str, Any]) -> None:
        await self._send(message)

    async def _fail(self, status: int) -> None:
        kind, status, body = _error(status, self._body.decode(errors="replace"))
        own = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-amzn-errortype", kind.encode()),
        ]
        kept = [pair for pair in self._headers if pair[0] not in _OF_THE_WHOLE]
        await self._send({"type": "http.response.start", "status": status, "headers": [*own, *kept]})
        await self._send({"type": "http.response.body", "body": body})


class _EventStream(_Answer):
    """Passes the answer on as events.

    Each carries one event or line of the model's own stream, whichever way its bytes have come: LiteLLM reads it so.
    """

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._separator = b""

    def _begin(self, headers: Headers) -> Headers:
        content_type = dict(headers).get(b"content-type", b"")
        self._separator = _SEPARATORS.get(content_type.partition(b";")[0], b"")
        kept = [pair for pair in headers if pair[0] not in _OF_THE_WHOLE]
        return [(b"content-type", _EVENT_STREAM), (b"x-amzn-sagemaker-content-type", content_type), *kept]

    async def _continue(self, message: MutableMapping[str, Any]) -> None:
        parts = self._parts(message.get("body", b""))
        await self._send({**message, "body": b"".join(map(payload_part, parts))})

    def _parts(self, data: bytes) -> list[bytes]:
        if not self._separator:
            return [data] if data else []
        *whole, rest = data.split(self._separator)
        return [*(part + self._separator for part in whole), *([rest] if rest else [])]


def payload_part(data: bytes) -> bytes:
    """Return the event that carries `data`: two lengths and their checksum, headers, payload, a checksum of all."""
    head = (len(data) + len(_EVENT_HEADERS) + 16).to_bytes(4) + len(_EVENT_HEADERS).to_bytes(4)
    message = head + zlib.crc32(head).to_bytes(4) + _EVENT_HEADERS + data
    return message + zlib.crc32(message).to_bytes(4)


def _header(name: str, value: str) -> bytes:
    return bytes([len(name)]) + name.encode() + bytes([_STRING]) + len(value).to_bytes(2) + value.encode()


_EVENT_HEADERS = (
    _header(":event-type", "PayloadPart")
    + _header(":content-type", "application/octet-stream")
    + _header(":message-type", "event")
)


def _error(status: int, text: str) -> tuple[str, int, bytes]:
    """Return name, status and body of the error that tells of an answer with `status` and `text`."""
    refused = _refusal(text)
    if refused is not None:
        (kind, status), message = refused
        return kind, status, json.dumps({"Message": message}).encode()
    whose = "client" if status < 500 else "server"
    message = f'Received {whose} error ({status}) from primary with message "{text}".'
    fields = {"Message": message, "OriginalStatusCode": status, "OriginalMessage": text}
    return "ModelError", _MODEL_ERROR, json.dumps(fields).encode()


def _refusal(text: str) -> tuple[tuple[str, int], str] | None:
    """Return the platform's name of a refusal of this server with its message; None for an answer of the model."""
    try:
        error = json.loads(text)
        return _REFUSED[error["type"]], error["message"]
    except (ValueError, TypeError, KeyError):
        return None
