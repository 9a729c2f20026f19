"""OpenAI's Batches: /v1/batches."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.batches.files_api import check_room, find_file, lifetime_s
from frontend.batches.records import BATCH_PREFIX, BatchRecord, OwnedRecords, if_readable, new_batch
from frontend.batches.runner import BatchRunner
from frontend.batches.settings import BatchSettings
from frontend.http.parameters import json_fields
from frontend.http.responses import json_response
from frontend.management.models import WholePathRoute
from frontend.storage.listing import first_of, list_object, page_of
from frontend.storage.objects import StoreThreads
from frontend.storage.owners import is_id, owner_of
from lmi_server.batches.lines import ROUTES
from lmi_server.contract.errors import BadParameterError, KeyBusyError, ObjectNotFoundError
from lmi_server.contract.texts.quoting import excerpt

logger = logging.getLogger(__name__)

_WINDOW = re.compile(r"([1-9]\d{0,8})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S = 14 * 86400
_PAGE = (100, 20)  # batches: most, default
_METADATA = (16, 64, 512)  # of the API: pairs, characters of a name and of a value


class _Create(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class BatchesApi:
    """Answers /v1/batches for the batches of each API key."""

    def __init__(
        self, records: OwnedRecords, threads: StoreThreads, settings: BatchSettings, runner: BatchRunner
    ) -> None:
        self._records = records
        self._threads = threads
        self._settings = settings
        self._runner = runner
        self._beginning = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            WholePathRoute("/v1/batches", {"GET": self.list, "POST": self.create}),
            WholePathRoute("/v1/batches/{batch_id}", {"GET": self.retrieve}),
            WholePathRoute("/v1/batches/{batch_id}/cancel", {"POST": self.cancel}),
        ]

    async def create(self, request: Request) -> Response:
        """OpenAI: begin a batch."""
        asked = await json_fields(request, _Create)
        owner = owner_of(request.scope)
        window_s = _window_s(asked.completion_window)
        if asked.endpoint not in ROUTES:
            raise BadParameterError(f"endpoint is {excerpt(asked.endpoint)}; send one of {', '.join(ROUTES)}")
        await find_file(self._records, self._threads, owner, asked.input_file_id)
        record = new_batch(asked.endpoint, asked.input_file_id, asked.completion_window, window_s)
        record.metadata = _checked_metadata(asked.metadata)
        record.output_lifetime_s = _output_lifetime_s(asked.output_expires_after)
        async with self._beginning:  # else requests at the same time would not count each other's
            await self._check_room(owner)
            await self._threads.serve(self._records.begin_batch, owner, record)
        self._runner.wake()
        return json_response(record.as_object())

    async def _check_room(self, owner: str) -> None:
        """Raise KeyBusyError or PayloadTooLargeError if the key may not have another batch, which makes files."""
        await check_room(self._records, self._threads, self._settings, owner)
        waiting = await self._threads.serve(self._records.unfinished_ids, owner)
        if len(waiting) >= self._settings.batches_max_unfinished:
            raise KeyBusyError(
                f"this API key has {len(waiting)} batches that are not finished, and may have batches_max_unfinished="
                f"{self._settings.batches_max_unfinished}; wait for one, or cancel it"
            )
        max_kept = self._settings.batches_max_kept
        removed = await self._threads.serve(self._records.remove_oldest, owner, max_kept - 1)
        if removed:
            logger.warning(
                "an API key has batches_max_kept=%d batches: forgot the oldest %d that had ended", max_kept, removed
            )

    async def list(self, request: Request) -> Response:
        """OpenAI: list the batches of this API key."""
        owner = owner_of(request.scope)
        ids = await self._threads.serve(self._records.batch_ids, owner)
        asked = page_of(ids, request.query_params, *_PAGE)
        records, has_more = await self._threads.serve(
            first_of, *asked, if_readable(partial(self._records.batch, owner))
        )
        shown = [(self._runner.running(each.id) or each).as_object() for each in records]
        return json_response(list_object(shown, has_more))

    async def retrieve(self, request: Request) -> Response:
        """OpenAI: describe a batch."""
        return json_response((await self._batch(request)).as_object())

    async def cancel(self, request: Request) -> Response:
        """OpenAI: cancel a batch. What is answered by then is in its output."""
        record = await self._batch(request)
        if record.has_ended:
            raise BadParameterError(f"batch {record.id} is {record.status}, and cannot be cancelled")
        await self._threads.serve(self._records.cancellations.add, owner_of(request.scope), record.id)
        self._runner.wake()
        return json_response({**record.as_object(), "status": "cancelling"})

    async def _batch(self, request: Request) -> BatchRecord:
        """Return the batch of the path. Raises ObjectNotFoundError if this API key has no such batch."""
        batch_id, owner = request.path_params["batch_id"], owner_of(request.scope)
        known = is_id(BATCH_PREFIX, batch_id)
        record = await self._threads.serve(self._records.batch, owner, batch_id) if known else None
        if record is None:
            raise ObjectNotFoundError(f"No batch found with id {excerpt(batch_id)}")
        return self._runner.running(batch_id) or record


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = 0 if found is None else int(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise BadParameterError(
            f"completion_window is {excerpt(text)}; send 24h, or another number of s, m, h or d up to 14d"
        )
    return seconds


def _checked_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    pairs, longest_name, longest_value = _METADATA
    given = metadata or {}
    if len(given) > pairs or any(len(name) > longest_name or len(text) > longest_value for name, text in given.items()):
        raise BadParameterError(
            f"metadata takes {pairs} pairs; a name has up to {longest_name} characters, a value {longest_value}"
        )
    return metadata


def _output_lifetime_s(asked: Mapping[str, Any] | None) -> int | None:
    if asked is None:
        return None
    if asked.get("anchor", "created_at") != "created_at":
        raise BadParameterError("output_expires_after.anchor takes created_at")
    return lifetime_s("output_expires_after.seconds", asked.get("seconds"))
