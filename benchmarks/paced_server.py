"""A server of OpenAI's completions that sends each token at a time that is fixed, and records when it did.

    python -m benchmarks.paced_server PORT FIRST_MS TOKEN_MS

The first token of a request comes FIRST_MS after it, each further one TOKEN_MS later, as often as `max_tokens` says.
The server does next to nothing else, so what a client measures with it is the client's own. `GET /records` returns what
the server saw of each request since the last call: JSON with `begin`, and `tokens`, in seconds of one clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import uvloop

_MODEL = {"id": "lmi", "object": "model", "created": 0, "owned_by": "benchmarks", "max_model_len": 8192}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class Request:
    """When a request was complete, and when each of its tokens was written."""

    begin: float
    tokens: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """A connection that a client keeps; `records` gets the requests."""

    def __init__(self, records: list[Request], first_s: float, token_s: float) -> None:
        self._records = records
        self._first_s, self._token_s = first_s, token_s
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.WriteTransport
        self._url = self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's have other classes

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # --- what the parser calls ---

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._body:
            self._generate(json.loads(self._body))
        elif self._url.startswith(b"/records"):
            self._answer([{"begin": request.begin, "tokens": request.tokens} for request in self._records])
            self._records.clear()
        else:
            self._answer({"object": "list", "data": [_MODEL]})

    # --- answers ---

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _generate(self, asked: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        request = Request(time.perf_counter())
        self._records.append(request)
        self._transport.write(_HEAD)
        due = loop.time() + self._first_s
        for number in range(count := int(asked["max_tokens"])):
            loop.call_at(due + number * self._token_s, self._write, request, number, count, str(asked["prompt"]))

    def _write(self, request: Request, number: int, count: int, prompt: str) -> None:
        """Write a token; with the last one, all that ends the answer."""
        is_last = number + 1 == count
        events = [_event(choices=[_choice(number, "length" if is_last else None)])]
        if is_last:
            sizes = {"prompt_tokens": len(prompt.split()), "completion_tokens": count}
            events += [_event(choices=[], usage=sizes | {"total_tokens": sum(sizes.values())}), b"data: [DONE]\n\n"]
        data = b"".join(events)
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if is_last else b""))
        request.tokens.append(time.perf_counter())


def _choice(number: int, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": f" word{number}", "logprobs": None, "finish_reason": reason}


def _event(**more: Any) -> bytes:
    head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "lmi"}
    return b"data: %b\n\n" % json.dumps(head | more).encode()


async def serve(port: int, first_s: float, token_s: float) -> None:
    """Serve on the port of this machine until the process ends."""
    records: list[Request] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(records, first_s, token_s), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000, float(sys.argv[3]) / 1000))
