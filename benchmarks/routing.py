"""Measures the latency that a router adds: `lmi-server route`, and LiteLLM's proxy if it is installed somewhere.

    python -m benchmarks.routing [--litellm /path/to/bin/litellm] [--requests 300]

A server answers every chat at once with the same bytes. One client asks it one request at a time: directly, through
`lmi-server route`, and through LiteLLM, in turns within one run. The table has the medians, whole answers and the first
byte of streams, and what each router adds to the direct ones. LiteLLM belongs into an environment of its own:

    python -m venv /tmp/litellm && /tmp/litellm/bin/pip install 'litellm[proxy]'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.relay import Server

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "one two"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
    }
).encode()
DELTA = {"index": 0, "delta": {"role": "assistant", "content": "one"}, "finish_reason": None}
CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "model", "choices": [DELTA]}
EVENT = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
MODELS = b'{"object": "list", "data": [{"id": "model", "object": "model"}]}'
TURN = 20


class AnsweringServer(asyncio.Protocol):
    """Answers without parsing more than it must."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(body) < int(lengths[0].partition(b":")[2] if lengths else 0):
            return
        self._received = b""
        if head.startswith(b"POST") and b'"stream":true' in body.replace(b" ", b""):
            start = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            events = (EVENT, EVENT, b"data: [DONE]\n\n")
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
            self._transport.write(start + chunks + b"0\r\n\r\n")
        else:
            text = ANSWER if head.startswith(b"POST") else MODELS
            start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            self._transport.write(start + b"content-length: %d\r\n\r\n%b" % (len(text), text))


async def answer_all(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(AnsweringServer, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def chat(stream: bool) -> bytes:
    fields = {"model": "model", "messages": [{"role": "user", "content": "word " * 200}], "stream": stream}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer x\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Asking:
    """One connection that asks again and again; `seconds` are the times to the first byte of each answer."""

    def __init__(self, server: Server, stream: bool) -> None:
        self.seconds: list[float] = []
        self._port = server.port
        self._request = chat(stream)
        self._stream = stream

    async def ask(self, count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        for _ in range(count):
            began = time.perf_counter()
            writer.write(self._request)
            status = await reader.readline()
            self.seconds.append(time.perf_counter() - began)
            assert b" 200 " in status, status
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"transfer-encoding: chunked" in head:
                await reader.readuntil(b"0\r\n\r\n")
            else:
                length = head.partition(b"content-length:")[2].split()[0]
                await reader.readexactly(int(length))
        writer.close()


async def measure(servers: Sequence[Server], stream: bool, requests: int) -> list[float]:
    """Return the median of each server in milliseconds; they are asked in turns."""
    asking = [Asking(server, stream) for server in servers]
    for each in asking:
        await each.ask(TURN)  # what the first requests do once
        each.seconds.clear()
    for _ in range(-(-requests // TURN)):
        for each in asking:
            await each.ask(TURN)
    return [1000 * statistics.median(each.seconds) for each in asking]


@contextlib.contextmanager
def started(*command: str) -> Iterator[Server]:
    server = Server(*command)
    try:
        yield server
    finally:
        server.stop()


def litellm_config(directory: str, upstream: Server) -> str:
    file = Path(directory, "litellm.yaml")
    base = f"http://127.0.0.1:{upstream.port}/v1"
    model = {"model_name": "model", "litellm_params": {"model": "openai/model", "api_base": base, "api_key": "x"}}
    settings = {"dangerously_permit_weak_or_unset_master_key": True}  # it asks for no key, as the others here
    file.write_text(
        json.dumps({"model_list": [model], "general_settings": settings}), encoding="utf-8"
    )  # which is YAML as well
    return str(file)


async def compare(litellm: str | None, requests: int) -> None:
    with contextlib.ExitStack() as stack:
        me = (sys.executable, "-m")
        upstream = stack.enter_context(started(*me, "benchmarks.routing", "--serve", "{port}"))
        await upstream.ready(chat(stream=False))
        url = f"http://127.0.0.1:{upstream.port}"
        options = ("--port", "{port}", "--log-level", "warning")
        servers = {
            "direct": upstream,
            "lmi-server route": stack.enter_context(started(*me, "lmi_server", "route", url, *options)),
        }
        if litellm is not None:
            config = litellm_config(stack.enter_context(tempfile.TemporaryDirectory()), upstream)
            command = (litellm, "--config", config, "--port", "{port}", "--host", "127.0.0.1", "--telemetry", "False")
            servers["LiteLLM's proxy"] = stack.enter_context(started(*command))
        for server in servers.values():
            await server.ready(chat(stream=False))
        found = {stream: await measure(list(servers.values()), stream, requests) for stream in (False, True)}
    show(list(servers), found)


def show(names: Sequence[str], found: dict[bool, list[float]]) -> None:
    table = Table(title="median ms of one request at a time")
    for column in ("", "whole answer", "added", "first byte of a stream", "added"):
        table.add_column(column)
    for number, name in enumerate(names):
        cells = []
        for stream in (False, True):
            cells += [f"{found[stream][number]:.2f}", f"{found[stream][number] - found[stream][0]:.2f}"]
        table.add_row(name, *cells)
    Console(width=110).print(table)
    if len(names) > 2:
        ratios = [(found[stream][2] - found[stream][0]) / (found[stream][1] - found[stream][0]) for stream in found]
        print(
            f"LiteLLM adds {ratios[0]:.1f} times as much to whole answers, {ratios[1]:.1f} times to streams (aim: 10)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="the program of an environment with litellm[proxy]")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(answer_all(arguments.serve))
    else:
        uvloop.run(compare(arguments.litellm, arguments.requests))


if __name__ == "__main__":
    main()
