"""OpenAI's Files: /v1/files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from frontend.batches.records import FILE_PREFIX, FileRecord, OwnedRecords, content_key, if_readable
from frontend.batches.settings import BatchSettings
from frontend.batches.upload import Upload, read_upload
from frontend.http.protocol import held_by
from frontend.http.responses import json_response
from frontend.management.models import WholePathRoute
from frontend.storage.listing import first_of, list_object, page_of
from frontend.storage.objects import StoreThreads
from frontend.storage.owners import is_id, new_id, owner_of
from lmi_server.contract.errors import (
    BadParameterError,
    ObjectNotFoundError,
    PayloadTooLargeError,
    UnsupportedEncodingError,
)
from lmi_server.contract.texts.quoting import excerpt

_MAX_FILES = 10_000  # of one API key
_PURPOSE = "batch"
_LONGEST_NAME = 255
_PART = 1 << 20  # bytes of a file that are read at a time
_EXPIRY = (3600, 2_592_000)  # seconds that the API allows


class FilesApi:
    """Answers /v1/files for the files of each API key."""

    def __init__(self, records: OwnedRecords, threads: StoreThreads, settings: BatchSettings) -> None:
        self._records = records
        self._threads = threads
        self._settings = settings
        self._arriving: Counter[str] = Counter()  # bytes of uploads that have not ended, by owner

    def routes(self) -> list[Route]:
        return [
            WholePathRoute("/v1/files", {"GET": self.list, "POST": self.create}),
            WholePathRoute("/v1/files/{file_id}", {"GET": self.retrieve, "DELETE": self.delete}),
            WholePathRoute("/v1/files/{file_id}/content", {"GET": self.content}),
        ]

    async def create(self, request: Request) -> Response:
        """OpenAI: upload a file."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise UnsupportedEncodingError("a file is uploaded without Content-Encoding; send it as it is")
        owner = owner_of(request.scope)
        stored = await check_room(self._records, self._threads, self._settings, owner)
        file_id = new_id(FILE_PREFIX)
        record = await self._receive(request, owner, file_id, stored)
        await self._threads.serve(self._records.save_file, owner, record)
        return json_response(record.as_object())

    async def _receive(self, request: Request, owner: str, file_id: str, stored: int) -> FileRecord:
        """Store the content as it arrives, and return its record. Nothing is stored if this raises.

        `stored` are the bytes of the owner's files.
        """
        threads, opened = self._threads, self._records.store.writer(content_key(owner, file_id))
        file = await threads.serve(opened.__enter__)
        size = 0

        async def write(data: bytes) -> None:
            nonlocal size
            size += len(data)
            self._arriving[owner] += len(data)
            if size > self._settings.batches_max_file_size:
                limit = self._settings.batches_max_file_size
                raise PayloadTooLargeError(f"the file is longer than batches_max_file_size={limit} bytes")
            limit, arriving = self._settings.batches_max_size, self._arriving[owner]
            if arriving > limit or stored + arriving - size >= limit:
                raise PayloadTooLargeError(
                    f"this API key's files and uploads take batches_max_size={limit} bytes; wait for an upload"
                )
            await threads.serve(file.write, data)

        try:
            upload = await read_upload(request.headers.get("content-type", ""), _pieces(request), write)
            record = self._record(file_id, size, upload)
            await check_room(self._records, threads, self._settings, owner)  # others may have ended since
        except BaseException as error:
            await threads.serve(opened.__exit__, type(error), error, error.__traceback__)
            raise
        else:
            await threads.serve(opened.__exit__, None, None, None)
            return record
        finally:
            self._arriving[owner] -= size
            if not self._arriving[owner]:
                del self._arriving[owner]

    def _record(self, file_id: str, size: int, upload: Upload) -> FileRecord:
        purpose = upload.fields.get("purpose")
        if purpose != _PURPOSE:
            raise BadParameterError(f"purpose is {excerpt(purpose or 'missing')}; send {_PURPOSE}, which files are for")
        now = int(time.time())
        name = excerpt(upload.filename or "", _LONGEST_NAME)
        return FileRecord(file_id, size, now, name, purpose, now + self._lifetime_s(upload.fields))

    def _lifetime_s(self, fields: dict[str, str]) -> int:
        text = fields.get("expires_after[seconds]")
        if text is None:
            return int(self._settings.batches_lifetime)
        if fields.get("expires_after[anchor]", "created_at") != "created_at":
            raise BadParameterError("expires_after[anchor] takes created_at")
        return lifetime_s("expires_after[seconds]", int(text) if text.isdecimal() and len(text) < 9 else text)

    async def list(self, request: Request) -> Response:
        """OpenAI: list the files of this API key."""
        owner, query = owner_of(request.scope), request.query_params
        ids = await self._threads.serve(self._records.file_ids, owner)
        asked, purpose = page_of(ids, query, _MAX_FILES, _MAX_FILES), query.get("purpose")

        def load(file_id: str) -> FileRecord | None:
            record = self._records.file(owner, file_id)
            return None if record is None or purpose not in (None, record.purpose) else record

        records, has_more = await self._threads.serve(first_of, *asked, if_readable(load))
        return json_response(list_object([each.as_object() for each in records], has_more))

    async def retrieve(self, request: Request) -> Response:
        """OpenAI: describe a file."""
        return json_response((await self._file(request)).as_object())

    async def delete(self, request: Request) -> Response:
        """OpenAI: delete a file. A batch that still reads it fails."""
        record = await self._file(request)
        await self._threads.serve(self._records.remove_file, owner_of(request.scope), record.id)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """OpenAI: return the content of a file."""
        record = await self._file(request)
        key = content_key(owner_of(request.scope), record.id)
        first = await self._threads.serve(self._records.store.read, key, 0, _PART)
        return StreamingResponse(
            self._parts(key, first),
            HTTPStatus.OK,
            {"content-length": str(record.bytes), "content-disposition": "attachment"},
            "application/octet-stream",
        )

    async def _parts(self, key: str, part: bytes) -> AsyncIterator[bytes]:
        offset = 0
        while part:
            yield part
            offset += len(part)
            part = await self._threads.run(self._records.store.read, key, offset, _PART)

    async def _file(self, request: Request) -> FileRecord:
        """Return the file of the path. Raises ObjectNotFoundError if this API key has no such file."""
        file_id = request.path_params["file_id"]
        return await find_file(self._records, self._threads, owner_of(request.scope), file_id)


async def check_room(records: OwnedRecords, threads: StoreThreads, settings: BatchSettings, owner: str) -> int:
    """Return the bytes of an owner's files. Raises PayloadTooLargeError if it may not have another file."""
    sizes = await threads.serve(records.sizes, owner)
    if len(sizes) >= _MAX_FILES:
        raise PayloadTooLargeError(f"this API key has {len(sizes)} files, and may have {_MAX_FILES}; delete some")
    if sum(sizes) >= settings.batches_max_size:
        raise PayloadTooLargeError(
            f"the files of this API key take batches_max_size={settings.batches_max_size} bytes; delete some"
        )
    return sum(sizes)


async def find_file(records: OwnedRecords, threads: StoreThreads, owner: str, file_id: str) -> FileRecord:
    """Return a file of an owner. Raises ObjectNotFoundError."""
    record = await threads.serve(records.file, owner, file_id) if is_id(FILE_PREFIX, file_id) else None
    if record is None:
        raise ObjectNotFoundError(f"No such File object: {excerpt(file_id)}")
    return record


def lifetime_s(name: str, value: object) -> int:
    """Return a client's lifetime of files in seconds. Raises BadParameterError."""
    low, high = _EXPIRY
    if type(value) is not int or not low <= value <= high:
        raise BadParameterError(f"{name} is {excerpt(str(value))}; it takes an integer from {low} to {high}")
    return value


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. What is written is not held in memory any more."""
    held = held_by(request.scope)
    try:
        async for piece in request.stream():
            yield piece
            held.add(-len(piece))
    except ClientDisconnect:
        raise BadParameterError("the client went away before its upload was complete") from None
