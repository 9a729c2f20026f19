"""A load of OpenAI completions: connections that always have a request open.

The client parses as little as it can, so that it takes little of the CPU that it shares with the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Seen:
    """The measurements of one answer: seconds to its first bytes, seconds between its pieces, tokens."""

    first: float
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


class Connection(asyncio.Protocol):
    """One connection that sends requests one after the other and reads each answer to its end."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._data = bytearray()
        self._times: list[tuple[float, int]] = []
        self._end = 0  # bytes of the whole answer, -1 for a chunked one; 0 until its head has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {bytes(self._data[-300:])!r}"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._times.append((time.perf_counter(), len(self._data)))
        if self._is_complete() and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def ask(self, request: bytes, tokens: int) -> Seen:
        """Send `request` and return the measurements. Raises AssertionError unless the answer has `tokens` tokens."""
        assert self._transport is not None
        self._data, self._times, self._end = bytearray(), [], 0
        self._done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._transport.write(request)
        await self._done
        assert self._data.startswith(b"HTTP/1.1 200"), bytes(self._data[:500])
        assert b'"completion_tokens":%d' % tokens in self._data, bytes(self._data[-500:])
        head = self._data.index(b"\r\n\r\n") + 4
        arrivals = [at for at, size in self._times if size > head + 8]
        return Seen(arrivals[0] - began, [b - a for a, b in pairwise(arrivals)], tokens)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _is_complete(self) -> bool:
        if not self._end:
            head, separator, _ = self._data.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            if not separator:
                return False
            self._end = len(head) + 4 + int(length) if length else -1
        return len(self._data) == self._end if self._end > 0 else self._data.endswith(_LAST_CHUNK)


def request_bytes(model: str, prompt: str | list[int], tokens: int, stream: bool, **fields: Any) -> bytes:
    """Return a greedy request for exactly `tokens` tokens, with further fields."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **fields}
    body["ignore_eos"] = True
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def run_load(port: int, requests: Sequence[bytes], connections: int, tokens: int) -> tuple[float, list[Seen]]:
    """Send all requests over `connections` connections; return the seconds that this took and what was measured."""
    loop = asyncio.get_running_loop()
    waiting = iter(requests)
    seen: list[Seen] = []

    async def client() -> None:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        for request in waiting:
            seen.append(await connection.ask(request, tokens))
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    return time.perf_counter() - began, seen
