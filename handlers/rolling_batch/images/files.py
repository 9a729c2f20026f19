"""The images that a chat names: which parts of its messages they are, and the bytes of their files.

A request may name an image by a data: URL, or by an address of the public internet (`lmi_server/media/`). All limits
hold before anything is decoded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import URLError

from handlers.rolling_batch.images.options import ImageOptions
from lmi_server.contract.errors import PayloadTooLargeError, RequestError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.media.fetching import MAX_BYTES, TooLargeError, fetch_bytes
from lmi_server.media.public_addresses import PrivateAddressError

_REMEDY = "send a data: URL with base64, such as data:image/png;base64,..., or an http or https URL"
_TEXT, _IMAGE = "text", "image_url"
_FETCH_S = 30.0
PLACEHOLDER: Mapping[str, str] = {"type": "image"}
"""What chat templates take in place of an image."""


@dataclass(frozen=True)
class ImagePart:
    """An image of a chat: its URL, and its `name` in errors."""

    name: str
    url: str

    @property
    def is_inline(self) -> bool:
        """Whether the URL holds the file itself."""
        return self.url[:5].lower() == "data:"


def holds_images(messages: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether a part of a message is not text."""
    return any(part.get("type") != _TEXT for _, part in _parts(messages or ()))


def image_parts(messages: Sequence[Mapping[str, Any]], limit: int) -> list[ImagePart]:
    """Return the images of a chat, in order. Raises RequestError for any other part, and for more than `limit`."""
    found = [_image_part(name, part) for name, part in _parts(messages) if part.get("type") != _TEXT]
    if len(found) > limit:
        raise RequestError(
            f"messages: {len(found)} images are more than option.limit_mm_per_prompt allows ({limit}); send fewer, or"
            " raise it"
        )
    return found


def with_placeholders(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them: with a mark in place of each image."""
    return [
        {**message, "content": [part if part.get("type") == _TEXT else PLACEHOLDER for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            yield from ((f"messages[{index}].content[{place}]", part) for place, part in enumerate(content))


def _image_part(name: str, part: Mapping[str, Any]) -> ImagePart:
    kind = part.get("type")
    if kind != _IMAGE:
        raise RequestError(f"{name}.type: {excerpt(str(kind), 40)} is not allowed; send text or image_url")
    value = part.get(_IMAGE)
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise RequestError(f"{name}.image_url must be an object with a url; {_REMEDY}")
    return ImagePart(f"{name}.image_url.url", url)


class ImageFiles:
    """Brings the files of images, as the options of the model allow."""

    def __init__(self, options: ImageOptions) -> None:
        self._hosts: Collection[str] = options.allowed_media_domains
        self._private = options.allow_private_media

    def fetch(self, part: ImagePart, max_bytes: int) -> bytes:
        """Return the bytes of a file elsewhere. Raises RequestError, or PayloadTooLargeError for more than that."""
        if not part.url[:8].lower().startswith(("http://", "https://")):
            raise RequestError(f"{part.name}: '{excerpt(part.url, 40)}' is not allowed; {_REMEDY}")
        try:
            return fetch_bytes(
                part.url, private=self._private, limit_s=_FETCH_S, max_bytes=max_bytes, hosts=self._hosts
            )
        except TooLargeError:
            raise PayloadTooLargeError(
                f"{part.name}: the files that a request names by URL may have {MAX_BYTES >> 20} MiB together; send"
                " fewer or smaller ones"
            ) from None
        except PrivateAddressError as error:
            raise RequestError(f"{part.name}: {error}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if type(error) is URLError else error  # its own text has the reason in brackets
            why = excerpt(str(reason), 200)  # it may be the words of that server
            raise RequestError(
                f"{part.name}: '{excerpt(part.url, 80)}' cannot be fetched: {why}; send a data: URL, or a URL that"
                " the server can reach"
            ) from None


class FileRoom:
    """Counts what the files that requests fetched take, or may take while they are fetched: `limit` bytes in all."""

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit
        self._turn = asyncio.Lock()  # so that requests get room in the order in which they came
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[ReservedRoom]:
        """Wait for room for `size` bytes, and keep it for the block."""
        async with self._turn:
            while self.held + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self.held += size
        room = ReservedRoom(self, size)
        try:
            yield room
        finally:
            room.release()

    def give_back(self, size: int) -> None:
        self.held -= size
        self._freed.set()


class ReservedRoom:
    """What one request has of a FileRoom."""

    def __init__(self, room: FileRoom, size: int) -> None:
        self._room, self._size = room, size
        self._fetch: Future[bytes] | None = None

    def fetched(self, fetch: Future[bytes]) -> Awaitable[bytes]:
        """Return what a thread fetches into this room."""
        self._fetch = fetch
        return asyncio.wrap_future(fetch)

    def shrink(self, size: int) -> None:
        """Keep room for `size` bytes alone."""
        self._room.give_back(self._size - size)
        self._size = size

    def release(self) -> None:
        """Give the room back, once the thread that fetches for a client that has left is done."""
        loop = asyncio.get_running_loop()

        def give_back(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._room.give_back, self._size)

        # The traceback of a failed fetch has this room: with the fetch in it, it would hold itself and all files.
        fetch, self._fetch = self._fetch, None
        if fetch is None or fetch.done():
            self._room.give_back(self._size)
        else:
            fetch.add_done_callback(give_back)


def decoded(part: ImagePart) -> bytes:
    """Return the bytes of a data: URL. Raises RequestError or PayloadTooLargeError."""
    head, comma, encoded = part.url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"{part.name}: '{excerpt(part.url, 40)}' is not allowed; {_REMEDY}")
    if len(encoded) > MAX_BYTES * 4 // 3 + 4:
        raise PayloadTooLargeError(f"{part.name}: a file may have {MAX_BYTES >> 20} MiB; send a smaller one")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{part.name} is not base64; {_REMEDY}") from None
