"""Measures the latency that a router adds: `lmi-server route`, and LiteLLM's proxy if it is installed somewhere.

    python -m benchmarks.routing [--litellm /path/to/bin/litellm] [--requests 300]

A server answers every chat at once with the same bytes. One client asks it one request at a time: directly, through
`lmi-server route`, and through LiteLLM, in turns within one run. The table has the medians, whole answers and the first
event of streams, and what each router adds to the direct ones. LiteLLM belongs into an environment of its own:

    python -m venv /tmp/litellm && /tmp/litellm/bin/pip install 'litellm[proxy]'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.figures import in_turns, parser_of, show
from benchmarks.load import CHAT, run_load
from benchmarks.raw_load import post
from benchmarks.servers import Server, started

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


BODY = {"model": "model", "messages": [{"role": "user", "content": "word " * 200}]}
KEY = ("authorization", "Bearer x")


def asking(server: Server, stream: bool) -> Callable[[], list[float]]:
    """Return what asks one request at a time, and returns the seconds to the end of each answer, or its first event."""

    def ask() -> list[float]:
        bodies = [{**BODY, "stream": stream}] * TURN
        _, records = asyncio.run(run_load(server.port, bodies, 1, None, CHAT, headers=(KEY,)))
        return [(record.first if stream and record.first else record.end) - record.sent for record in records]

    return ask


def measure(servers: Mapping[str, Server], stream: bool, requests: int) -> list[float]:
    """Return the median of each server in milliseconds; they are asked in turns."""
    found = in_turns(-(-requests // TURN), {name: asking(server, stream) for name, server in servers.items()})
    return [1000 * statistics.median(itertools.chain.from_iterable(turns)) for turns in found.values()]


def litellm_config(directory: str, upstream: Server) -> str:
    file = Path(directory, "litellm.yaml")
    base = f"http://127.0.0.1:{upstream.port}/v1"
    model = {"model_name": "model", "litellm_params": {"model": "openai/model", "api_base": base, "api_key": "x"}}
    settings = {"dangerously_permit_weak_or_unset_master_key": True}  # it asks for no key, as the others here
    file.write_text(
        json.dumps({"model_list": [model], "general_settings": settings}), encoding="utf-8"
    )  # which is YAML as well
    return str(file)


def compare(litellm: str | None, requests: int) -> None:
    ready = post("/v1/chat/completions", BODY, "authorization: Bearer x")
    with contextlib.ExitStack() as stack:
        me = (sys.executable, "-m")
        servers = {"direct": stack.enter_context(started(*me, "benchmarks.routing", "--serve", "{port}"))}
        servers["direct"].wait_until_ready(ready)
        options = (servers["direct"].url, "--port", "{port}", "--log-level", "warning")
        servers["lmi-server route"] = stack.enter_context(started(*me, "lmi_server", "route", *options))
        if litellm is not None:
            config = litellm_config(stack.enter_context(tempfile.TemporaryDirectory()), servers["direct"])
            command = (litellm, "--config", config, "--port", "{port}", "--host", "127.0.0.1", "--telemetry", "False")
            servers["LiteLLM's proxy"] = stack.enter_context(started(*command))
        for server in servers.values():
            server.wait_until_ready(ready)
        found = [measure(servers, stream, requests) for stream in (False, True)]
    report(list(servers), found)


def report(names: Sequence[str], found: Sequence[Sequence[float]]) -> None:
    """Print the milliseconds of whole answers and of first events, each by server; the first one is asked directly."""
    added = [[value - values[0] for value in values] for values in found]
    cells = ([f"{value:.2f}" for value in column] for pair in zip(found, added, strict=True) for column in pair)
    columns = ("", "whole answer", "added", "first event of a stream", "added")
    show(columns, list(zip(names, *cells, strict=True)), "median ms of one request at a time")
    if len(names) > 2:
        whole, streams = (values[2] / values[1] for values in added)
        print(f"LiteLLM adds {whole:.1f} times as much to whole answers, {streams:.1f} times to streams (aim: 10)")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--litellm", help="the program of an environment with litellm[proxy]")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(answer_all(arguments.serve))
    else:
        compare(arguments.litellm, arguments.requests)


if __name__ == "__main__":
    main()
