"""Requests, deltas of a model, and a server on the loopback interface for real clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hypothesis import strategies as st

from lmi_server.contract.errors import HandlerError, LmiServerError, RequestError
from lmi_server.contract.generation import Delta, Token, TopToken, Usage
from lmi_server.contract.protocol import Input
from lmi_server.dialects import Exchange, ServedModel, parse
from lmi_server.dialects.errors import error_reply

SERVED = ServedModel(name="model", served_names=("tiny",))
PROMPT_TOKENS = (Token(1, "Hel"), Token(2, "lo", -1.5))
DELTAS = (
    Delta(
        " Par",
        (Token(10, " Par", -0.5, top=(TopToken(10, " Par", -0.5), TopToken(11, " Lon", -1.25))),),
        prompt_text="Hello",
        prompt_tokens=PROMPT_TOKENS,
    ),
    Delta("", (Token(12, "\ufffd", -0.25, top=(TopToken(12, "\ufffd", -0.25),)),)),
    Delta("ís\u2028", (Token(13, "ís\u2028", 0.0, top=(TopToken(13, "ís\u2028", 0.0),)),)),
    Delta("", (Token(2, "</s>", -0.125, special=True),), finish_reason="eos_token", usage=Usage(2, 4, 1)),
)
TEXT = " París\u2028"


def request(route: str, body: Any, **headers: str) -> Input:
    """Return a request with `body` as JSON (bytes go as they are); header names with "_" for "-"."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    properties = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return Input(route, properties, [("data", data)])


def answer(exchange: Exchange, *deltas: Sequence[Delta]) -> bytes:
    """Return the bytes that a worker sends if sequence `i` of the exchange generates `deltas[i]`."""
    chunks = [exchange.first()]
    chunks += [exchange.add(index, delta) for index, sequence in enumerate(deltas) for delta in sequence]
    return b"".join(chunks) + exchange.last() if exchange.stream else exchange.body()


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which bears its type as its name, too."""
    sent = []
    for part in data.decode().split("\n\n")[:-1]:
        name, line = part.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        sent.append(event)
    return sent


def outcome(received: Input) -> bytes | RequestError:
    """Return the whole answer to a request, or the RequestError that refuses it; other exceptions propagate."""
    try:
        exchange = parse(received, SERVED)
    except RequestError as error:
        return error
    return answer(exchange, *[DELTAS for _ in exchange.requests])


@st.composite
def generations(draw: st.DrawFn) -> list[Delta]:
    """Draw what a handler may yield: steps of several tokens, text held back, text flushed without a token."""
    tokens = st.builds(Token, id=st.integers(0, 99), text=st.text(max_size=3), logprob=st.floats(-9, 0))
    steps = draw(st.lists(st.tuples(st.lists(tokens, max_size=3), st.booleans(), st.text(max_size=4)), max_size=6))
    deltas = [Delta("".join(t.text for t in step) if own else text, tuple(step)) for step, own, text in steps]
    reason = draw(st.sampled_from(["length", "eos_token", "stop_sequence"]))
    last = Delta(draw(st.text(max_size=4)), tuple(draw(st.lists(tokens, max_size=2))), reason, Usage(3, 5))
    return [*deltas, last]


@contextmanager
def serving(served: ServedModel, deltas: Sequence[Delta], breaks: bool = False) -> Iterator[str]:
    """Serve one model on the loopback interface; every sequence generates `deltas`, or breaks at the last one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            route = self.path.strip("/").removeprefix("v1/")
            self._send(*reply(route, Input(route, headers, [("data", body)], "request-1")))

        def _send(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response(status)
            for name, value in [*headers, ("content-length", str(len(data)))]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            return None

    def reply(route: str, received: Input) -> tuple[int, list[tuple[str, str]], bytes]:
        try:
            exchange = parse(received, served)
        except LmiServerError as error:
            return error_reply(route, error, request_id=received.request_id)
        return 200, [("content-type", exchange.content_type)], _data(exchange)

    def _data(exchange: Exchange) -> bytes:
        if not breaks:
            return answer(exchange, *[deltas for _ in exchange.requests])
        chunks = [exchange.first(), *[exchange.add(0, delta) for delta in deltas[:-1]]]
        return b"".join(chunks) + exchange.error_chunk(HandlerError("the engine broke"))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
