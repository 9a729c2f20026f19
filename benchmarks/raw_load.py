"""A load of equal requests on open connections, which takes next to no processor time from the server beside it.

It counts marks in what comes back and reads nothing else. `benchmarks.load` reads whole answers, with the client of
`lmi-server bench`. On two cores that client takes 3.2 us of a core for a token of a stream, and this one 0.6: of 64
streams of the relay it got 222,000 tokens/s, and this one 445,000 (medians of 4 turns of 3 s). It would measure itself.
Whole answers it gets as fast, at 28 us a request against 21. So benchmarks whose server is an engine use that one, and
benchmarks whose server does next to nothing for a token use this one.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, NamedTuple, cast

from benchmarks.servers import Server

PROMPT = "The capital of France is"
TOKEN = b'"token"'


def post(path: str, body: Any, *headers: str) -> bytes:
    """Return the bytes of a request with a body in JSON, and further lines of its head."""
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data


def echo(max_new_tokens: int, stream: bool) -> bytes:
    """Return a request for so many tokens."""
    return post("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": max_new_tokens}, "stream": stream})


class Client(asyncio.Protocol):
    """Sends one request after the other over one connection and counts what comes back; a token has a `mark`."""

    def __init__(self, request: bytes, stream: bool, mark: bytes = TOKEN) -> None:
        self.responses = 0
        self.tokens = 0
        self.chunks = 0
        self.latencies: list[float] = []
        self._request = request
        self._mark = mark
        self._chunked = stream
        self._transport: asyncio.WriteTransport | None = None
        self._has_begun = False  # the present answer
        self._answer = b""  # what has come of it, if it is not in chunks
        self._body_length = 0  # of every answer, 0 before the first
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        self._has_begun, self._answer = False, b""
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self.latencies.append(time.perf_counter() - self._sent_at)
            self._has_begun = True
        if self._chunked:
            self.tokens += data.count(self._mark)
            self.chunks += data.count(b"\r\n") // 2
            done = data.endswith(b"0\r\n\r\n")
        else:
            done = self._whole(data)
        if done:
            self.responses += 1
            self._next()

    def _whole(self, data: bytes) -> bool:
        """Return whether the answer is complete.

        All answers to one request have a body of the same length. Their heads differ: that of an answer that is traced
        has a line more.
        """
        self._answer += data
        head_end = self._answer.find(b"\r\n\r\n") + 4
        if head_end < 4:
            return False
        if not self._body_length:
            head = self._answer[:head_end]
            assert head.startswith(b"HTTP/1.1 200"), head
            if b"transfer-encoding: chunked" in head:
                self._chunked = True
                return data.endswith(b"0\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None, head
            self._body_length = int(length[1])
        return len(self._answer) >= head_end + self._body_length

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Rates(NamedTuple):
    """What a load has per second while it is measured; the last two are seconds of processor time."""

    requests: float
    tokens: float
    chunks: float
    front_end_s: float
    workers_s: float

    @property
    def cpu_s(self) -> float:
        return self.front_end_s + self.workers_s


class Load:
    """Connections that all send the same request again and again."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients

    @classmethod
    async def open(cls, server: Server, connections: int, request: bytes, stream: bool, mark: bytes = TOKEN) -> Load:
        """Open the connections. Raises OSError."""
        loop = asyncio.get_running_loop()
        load = cls([Client(request, stream, mark) for _ in range(connections)])
        for client in load.clients:
            await loop.create_connection(lambda client=client: client, "127.0.0.1", server.port)  # type: ignore[misc]
        return load

    async def measure(self, server: Server, seconds: float, warm_s: float = 0.5) -> Rates:
        """Return the rates during some seconds, after others."""
        await asyncio.sleep(warm_s)
        before, start = self._counts(server), time.perf_counter()
        await asyncio.sleep(seconds)
        after, end = self._counts(server), time.perf_counter()
        return Rates(*((new - old) / (end - start) for new, old in zip(after, before, strict=True)))

    def _counts(self, server: Server) -> tuple[float, ...]:
        counts = ("responses", "tokens", "chunks")
        return *(sum(getattr(client, name) for client in self.clients) for name in counts), *server.cpu_s()

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        await asyncio.sleep(0.5)  # until both sides have noticed


async def rates(
    server: Server, connections: int, request: bytes, stream: bool, seconds: float, warm_s: float = 0.5
) -> Rates:
    """Return the rates of a load on a server that is ready."""
    load = await Load.open(server, connections, request, stream)
    try:
        return await load.measure(server, seconds, warm_s)
    finally:
        await load.close()
