"""OpenAI's responses that are kept: /v1/responses/{id}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.detached.request import is_gone
from frontend.http.responses import json_response
from frontend.management.models import WholePathRoute
from frontend.storage.listing import limit_of, list_object
from frontend.storage.objects import StoreThreads
from frontend.storage.owners import is_id, owner_of
from frontend.stored_responses.background import CANCELLED, BackgroundResponses, end_early
from frontend.stored_responses.records import PREFIX, ResponseStore, StoredResponse
from lmi_server.contract.errors import BadParameterError, ObjectNotFoundError, PayloadTooLargeError
from lmi_server.contract.texts.quoting import excerpt

_PAGE = (100, 20)  # items: at most, by default
_MAX_LISTED = 4 << 20  # bytes of an input


class ResponsesApi:
    """Answers for the responses of each API key."""

    def __init__(self, store: ResponseStore, threads: StoreThreads, background: BackgroundResponses) -> None:
        self._store = store
        self._threads = threads
        self._background = background

    def routes(self) -> list[Route]:
        return [
            WholePathRoute("/v1/responses/{response_id}", {"GET": self.retrieve, "DELETE": self.delete}),
            WholePathRoute("/v1/responses/{response_id}/cancel", {"POST": self.cancel}),
            WholePathRoute("/v1/responses/{response_id}/input_items", {"GET": self.input_items}),
        ]

    async def retrieve(self, request: Request) -> Response:
        """OpenAI: return a response that is kept."""
        if request.query_params.get("stream", "false").lower() == "true":
            raise BadParameterError("Parameter stream is true; a kept response is returned as a whole: leave it out")
        return json_response((await self._record(request)).response)

    async def delete(self, request: Request) -> Response:
        """OpenAI: delete a response; one in the background ends."""
        async with self._background.ending(request.path_params["response_id"]):
            record = await self._record(request)
            await self._threads.serve(self._store.remove, owner_of(request.scope), record.id)
        self._background.cancel(record.id)
        return json_response({"id": record.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """OpenAI: end a response in the background."""
        async with self._background.ending(request.path_params["response_id"]):
            record = await self._record(request)
            if not record.response.get("background"):
                raise BadParameterError(f"response {record.id} is not in the background, and cannot be cancelled")
            if record.is_running:
                end_early(record.response, CANCELLED)
                await self._threads.serve(self._store.save, owner_of(request.scope), record)
                self._background.cancel(record.id)
        return json_response(record.response)

    async def input_items(self, request: Request) -> Response:
        """OpenAI: list the input of a response."""
        record = await self._record(request)
        return json_response(await self._threads.serve(_page, record, request.query_params))

    async def _record(self, request: Request) -> StoredResponse:
        """Return the response of the path. Raises ObjectNotFoundError if this API key has no such response."""
        response_id, owner = request.path_params["response_id"], owner_of(request.scope)
        known = is_id(PREFIX, response_id)
        record = await self._threads.serve(self._store.load, owner, response_id) if known else None
        if record is None:
            raise ObjectNotFoundError(f"Response with id '{excerpt(response_id)}' not found.")
        if record.is_running and is_gone(record.process, self._background.process):
            end_early(record.response, "failed", "server_error", "the server ended while it made the response")
        return record


def _page(record: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the list that a query asks for. Only what is on it makes objects: an input may have a million items."""
    items, limit = _items(record), limit_of(query, *_PAGE)
    numbers = range(len(items))[:: -1 if query.get("order", "desc") == "desc" else 1]
    after = query.get("after")
    if after is not None:
        places = (place for place, number in enumerate(numbers) if _item_id(record.id, number, items[number]) == after)
        start = next(places, None)
        if start is None:
            raise BadParameterError(f"Parameter after is {excerpt(after)}; it takes the id of an item")
        numbers = numbers[start + 1 :]
    listed = [_list_item(record.id, number, items[number]) for number in numbers[:limit]]
    return list_object(listed, len(numbers) > limit)


def _items(record: StoredResponse) -> list[Any]:
    """Return the items of an input. Raises PayloadTooLargeError if they would take much memory."""
    if len(bytes(record.input)) > _MAX_LISTED:
        raise PayloadTooLargeError(f"the input of response {record.id} is longer than {_MAX_LISTED} bytes")
    try:
        return msgspec.json.decode(record.input, type=list[Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadParameterError(f"the input of response {record.id} cannot be listed: {error}") from None


def _item_id(response_id: str, number: int, item: Any) -> Any:
    own = item.get("id") if isinstance(item, dict) else None
    return f"msg_{response_id.removeprefix(PREFIX)}_{number}" if own is None else own


def _list_item(response_id: str, number: int, item: Any) -> dict[str, Any]:
    """Return an item of an input as the API lists it: with an id, a type, and its content in parts."""
    given = item if isinstance(item, dict) else {}
    listed = {"type": "message", **given, "id": _item_id(response_id, number, item)}
    if isinstance(listed.get("content"), str):
        kind = "output_text" if listed.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": listed["content"]}]
    return listed
