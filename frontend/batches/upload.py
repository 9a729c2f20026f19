"""Reads an upload, a form of `multipart/form-data`, as it arrives: no more than a block of its file is in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.texts.quoting import excerpt

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^;\s"]{1,200}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:\s*form-data\s*;(.*)$", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb'[;\s]?(name|filename)="((?:[^"\\]|\\.)*)"|[;\s](name|filename)=([^;\s"]+)')
_LONGEST_HEAD = 16 * 1024  # bytes of the headers of a part
_LONGEST_FIELD = 4 * 1024  # bytes of a field that is no file
_MAX_PARTS = 20
_BLOCK = 256 * 1024  # bytes, from which on a part of the file is written

Write = Callable[[bytes], Awaitable[None]]


@dataclass
class Upload:
    """What an upload has beside its file. `filename` is the client's and names nothing here; None without a file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_upload(content_type: str, stream: AsyncIterator[bytes], write: Write) -> Upload:
    """Read a form whose field `file` goes to `write`. Raises BadParameterError if it is not such a form."""
    kind = content_type.partition(";")[0].strip().lower()
    found = _BOUNDARY.search(content_type)
    if kind != "multipart/form-data" or found is None:
        raise BadParameterError("the body is no multipart/form-data; send the fields file and purpose as a form")
    boundary = (found[1] or found[2]).encode("latin-1", "replace")
    return await _Form(b"\r\n--" + boundary, stream, write).read()


class _Form:
    """What has arrived of a form and is not read yet. A delimiter is a line end, two dashes and the boundary."""

    def __init__(self, delimiter: bytes, stream: AsyncIterator[bytes], write: Write) -> None:
        self._delimiter = delimiter
        self._stream = stream
        self._write = write
        self._buffer = bytearray(b"\r\n")  # the first delimiter need not have a line before it

    async def read(self) -> Upload:
        upload = Upload()
        await self._until(self._delimiter, _LONGEST_HEAD)  # a preamble is dropped
        for _ in range(_MAX_PARTS):
            if await self._is_last():
                if upload.filename is None:
                    raise BadParameterError("the form has no field file; send one")
                return upload
            name, filename = _names(await self._until(b"\r\n\r\n", _LONGEST_HEAD))
            if name != "file":
                value = await self._until(self._delimiter, _LONGEST_FIELD)
                upload.fields[name] = value.decode("utf-8", "replace")
            elif upload.filename is not None:
                raise BadParameterError("the form has two fields file; send one")
            else:
                upload.filename = filename or "file"
                await self._copy_file()
        raise BadParameterError(f"the form has more than {_MAX_PARTS} fields")

    async def _is_last(self) -> bool:
        """Read what follows a delimiter: two dashes at the end of the form, else the end of the line."""
        while len(self._buffer) < 2:
            await self._fill()
        mark = bytes(self._buffer[:2])
        if mark == b"--":
            return True
        if mark != b"\r\n":
            raise BadParameterError("the body is no form: no line end follows the boundary")
        return False  # the line end stays: a part without headers has the empty line at once

    async def _until(self, end: bytes, longest: int) -> bytes:
        """Take what comes before `end`, and `end`. Raises BadParameterError if that is more than `longest` bytes."""
        searched = 0
        while (found := self._buffer.find(end, searched)) < 0:
            searched = max(0, len(self._buffer) - len(end) + 1)
            if searched > longest:
                raise BadParameterError(f"a part of the form, or its headers, is longer than {longest} bytes")
            await self._fill()
        taken = bytes(self._buffer[:found])
        del self._buffer[: found + len(end)]
        return taken

    async def _copy_file(self) -> None:
        """Write the file up to the next delimiter. The end of a block may be the start of one, and is kept back."""
        delimiter, buffer = self._delimiter, self._buffer
        searched = 0
        while (found := buffer.find(delimiter, searched)) < 0:
            searched = max(0, len(buffer) - len(delimiter) + 1)
            if searched >= _BLOCK:
                await self._write(bytes(buffer[:searched]))
                del buffer[:searched]
                searched = 0
            await self._fill()
        await self._write(bytes(buffer[:found]))
        del buffer[: found + len(delimiter)]

    async def _fill(self) -> None:
        async for piece in self._stream:
            if piece:
                self._buffer += piece
                return
        raise BadParameterError("the body is no form: it ends before its last boundary")


def _names(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part and the name of its file, None if it has none."""
    found = _DISPOSITION.search(head)
    pairs = _PARAMETER.findall(found[1]) if found is not None else []
    given = {(one or other): (quoted or plain) for one, quoted, other, plain in pairs}
    if b"name" not in given:
        raise BadParameterError(f"a part of the form has no name: {excerpt(head.decode('latin-1'))}")
    filename = given.get(b"filename")
    return given[b"name"].decode("utf-8", "replace"), None if filename is None else filename.decode("utf-8", "replace")
