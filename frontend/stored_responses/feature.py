"""Stored responses, if `responses_store` says where they are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from frontend.detached.request import receive_body
from frontend.features import ServerFeature, ServerParts, Unset
from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.compression import decoded_body
from frontend.http.protocol import held_by
from frontend.http.responses import error_response, json_response
from frontend.relay.request import ClientGoneError, RelayedRequest
from frontend.storage.objects import StoreThreads, open_store
from frontend.storage.owners import new_id, owner_of
from frontend.stored_responses.api import ResponsesApi
from frontend.stored_responses.background import BackgroundResponses, in_progress
from frontend.stored_responses.capture import Keep, ResponseCapture
from frontend.stored_responses.conversation import ResponseRequest, history_of
from frontend.stored_responses.records import EMPTY, PREFIX, ResponseStore, StoredResponse
from frontend.stored_responses.settings import ResponseSettings
from lmi_server.contract.errors import LmiServerError
from lmi_server.dialects.routes import RESPONSES

logger = logging.getLogger(__name__)

_THREADS = 8
_SWEEP_S = 3600.0
_COPIES = 4  # of a body: as text, for the model, as a list of items, as it is stored


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature; without a store what says so. Raises ConfigurationError if the store cannot be used."""
    place = server.settings.part(ResponseSettings).responses_store
    return Unset(server, "responses_store", "/v1/responses") if place is None else _Feature(server, place)


class _Feature(ServerFeature):
    def __init__(self, server: ServerParts, place: str) -> None:
        self._server = server
        self._settings = server.settings.part(ResponseSettings)
        self._store = ResponseStore(open_store(place, "responses_store"), self._settings)
        self._threads = StoreThreads(_THREADS, "responses")
        self._longest = server.settings.max_request_size
        self._infer: Inference
        self._background: BackgroundResponses

    def wrap(self, infer: Inference) -> Inference:
        """Return what keeps the answers of requests for responses."""
        self._infer = infer
        capacity = self._settings.responses_max_background
        self._background = BackgroundResponses(infer, self._store, self._threads, capacity)
        return self._call

    def _call(self, target: Target, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one inference request. All others than those for responses pay for this look only."""
        if target[0] != RESPONSES:
            return self._infer(target, scope, receive, send)
        return self._serve(target, scope, receive, send)

    async def _serve(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refusal = await self._respond(target, scope, receive, send)
        except LmiServerError as error:
            refusal = error_response(RESPONSES, error)
        except ClientGoneError:
            return
        if refusal is not None:
            await self._server.answer(refusal, scope, receive, send)

    async def _respond(self, target: Target, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Answer a request, or return what the server itself answers. Raises LmiServerError and ClientGoneError."""
        owner = self._owner(scope)
        sent = await self._body(scope, receive)
        held_by(scope).reserve(len(sent) * _COPIES)
        request = ResponseRequest(sent)
        history = EMPTY
        if request.previous is not None:
            history = await self._threads.serve(history_of, self._store, owner, request.previous, self._longest)
        body = request.body_after(history)
        held_by(scope).reserve(max(0, len(body) - len(sent)))  # the conversation before
        _set_length(scope, len(body))
        forward = receive_body(body)
        if request.in_background:
            return await self._begin(owner, request, target, scope, forward)
        own = {"previous_response_id": request.previous, "store": request.is_kept, "background": False}
        if request.is_kept:
            own["id"] = new_id(PREFIX)
        keep = self._keep_as(owner, request) if request.is_kept else None
        await self._infer(target, scope, forward, ResponseCapture(send, own, keep))
        return None

    def _owner(self, scope: Scope) -> str:
        """Return whose response it is. The key stays in the headers for the check behind this."""
        probe = {**scope}
        if self._server.check is not None:
            self._server.check(probe)
        return owner_of(probe)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        reading = RelayedRequest(RESPONSES, scope, receive, self._server.settings.request_id_header.lower())
        body = await reading.read_body(self._longest)
        if "content-encoding" in reading.properties:
            body = await decoded_body(body, reading.properties, self._longest, held_by(scope))
        return body

    def _keep_as(self, owner: str, request: ResponseRequest) -> Keep:
        async def keep(response: dict[str, Any]) -> bool:
            try:
                await self._threads.run(self._store.save, owner, StoredResponse(response, msgspec.Raw(request.input)))
            except OSError as error:
                logger.error("response %s is not kept: %s", response["id"], error)
                return False
            return True

        return keep

    async def _begin(
        self, owner: str, request: ResponseRequest, target: Target, scope: Scope, receive: Receive
    ) -> Response:
        started = in_progress(new_id(PREFIX), request.model, request.previous)
        record = StoredResponse(started, msgspec.Raw(request.input), self._background.process)
        refusal = await self._background.start(owner, record, target, scope, receive)
        if refusal is None:
            return json_response(started)
        return Response(b"".join(refusal.items), refusal.status or 500, dict(refusal.headers))

    def request_routes(self) -> list[Route]:
        return ResponsesApi(self._store, self._threads, self._background).routes()

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._sweep(),)

    async def _sweep(self) -> None:
        """Remove responses whose time is over, until this is cancelled."""
        while True:
            try:
                await self._threads.run(self._store.sweep)
            except OSError as error:
                logger.error("responses whose time is over stay, because their store cannot be read: %s", error)
            await asyncio.sleep(_SWEEP_S)

    async def finish(self) -> None:
        await self._background.finish()

    def give_up(self) -> None:
        self._background.give_up()


def _set_length(scope: Scope, length: int) -> None:
    """Have the headers say how long the body is that the model gets."""
    changed = {b"content-length", b"content-encoding", b"transfer-encoding"}
    kept = [header for header in scope["headers"] if header[0] not in changed]
    scope["headers"] = [*kept, (b"content-length", b"%d" % length)]
