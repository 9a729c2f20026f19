"""Clients of the chaos suite: each asks one thing in a way of its own, and says how that ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httptools

_LIMIT_S = 180.0  # for an ending; a model that is loaded again may take many seconds of that

ERRORS = frozenset({404, 422, 503})
"""Statuses with which an attacked model may answer: not there (any more), quarantined, or not able to serve now."""


@dataclass(frozen=True)
class Ending:
    """How a request ended: "answer", "error" (of a documented kind), "cut" (by the client), or what went wrong."""

    kind: str
    detail: str = ""

    @property
    def is_proper(self) -> bool:
        return self.kind in ("answer", "error", "cut")


@dataclass(frozen=True)
class Question:
    """One request; `is_right` says whether a whole body of status 200 answers it. `errors` are other statuses."""

    model: str
    data: bytes
    is_right: Callable[[bytes], bool]
    shown: str
    errors: frozenset[int] = ERRORS


class Answers:
    """Takes the bytes of answers apart."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.bodies: list[bytes] = []
        self._body = bytearray()
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.statuses.append(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.bodies.append(bytes(self._body))
        self._body.clear()


# --- questions ---

_numbers = itertools.count(1)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in [*lines, "content-type: application/json", ""]).encode() + body


def echo_question(model: str, chance: random.Random, stream: bool) -> Question:
    """Ask a model that echoes; no two questions have the same answer, so that a mix-up would be seen."""
    words = [f"w{next(_numbers)}", *chance.choices(["a", "b", "c"], k=chance.randrange(6))]
    count = chance.choice([1, 3, 10, 60])
    text = "".join(f" {word}" for word in itertools.islice(itertools.cycle(words), count))
    asked = {"inputs": " ".join(words), "parameters": {"max_new_tokens": count}, "stream": stream}

    def is_right(body: bytes) -> bool:
        if not stream:
            return bool(json.loads(body)["generated_text"] == text)
        return "".join(json.loads(line)["token"]["text"] for line in body.splitlines() if line) == text

    return Question(model, post(f"/predictions/{model}", json.dumps(asked).encode()), is_right, words[0])


def own_question(model: str, chance: random.Random) -> Question:
    """Ask the model whose code sends the body back after a while."""
    body = f"own {next(_numbers)} ".encode() * chance.choice([1, 10, 5000])
    data = post(f"/predictions/{model}", body, f"x-sleep: {chance.choice(['0', '0', '0.05'])}")
    return Question(model, data, lambda answer: answer == body, body[:12].decode())


def real_question(model: str, chance: random.Random, stream: bool) -> Question:
    """Ask a real model; its text is not known."""
    asked = {"inputs": f"{next(_numbers)} hello", "parameters": {"max_new_tokens": chance.choice([1, 8, 30])}}
    data = post(f"/predictions/{model}", json.dumps({**asked, "stream": stream}).encode())
    return Question(model, data, lambda body: b"generated_text" in body, str(asked["inputs"]))


# --- ways to ask ---

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Way = Callable[[Question, int, random.Random], Any]


async def ask(question: Question, way: Way, port: int, chance: random.Random) -> Ending:
    """Ask in this way. An ending that does not come is one that is not proper."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await way(question, port, chance)
    except TimeoutError:
        return Ending("none", f"nothing ended the request within {_LIMIT_S:.0f} s")


async def plainly(question: Question, port: int, chance: random.Random) -> Ending:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question.data)
    return await _ending(question, _everything(reader), writer)


async def slowly_sending(question: Question, port: int, chance: random.Random) -> Ending:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = len(question.data) // 3 + 1
    for start in range(0, len(question.data), size):
        writer.write(question.data[start : start + size])
        await asyncio.sleep(chance.random() / 2)
    return await _ending(question, _everything(reader), writer)


async def slowly_reading(question: Question, port: int, chance: random.Random) -> Ending:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    reader, writer = await asyncio.open_connection(sock=connection, limit=256)
    writer.write(question.data)
    return await _ending(question, _bit_by_bit(reader, chance), writer)


async def half_closing(question: Question, port: int, chance: random.Random) -> Ending:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question.data)
    writer.write_eof()
    return await _ending(question, _everything(reader), writer)


async def vanishing(question: Question, port: int, chance: random.Random) -> Ending:
    """Go away at some moment: before the request is complete, before its answer, or in the middle of that."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question.data[: chance.choice([10, len(question.data) - 1, len(question.data), len(question.data)])])
    await asyncio.sleep(chance.choice([0, 0.01, 0.2, 1]))
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.close()
    return Ending("cut")


async def _everything(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data


async def _bit_by_bit(reader: asyncio.StreamReader, chance: random.Random) -> AsyncIterator[bytes]:
    for _ in range(10):
        if not (data := await reader.read(300)):
            return
        yield data
        await asyncio.sleep(chance.random() / 10)
    async for data in _everything(reader):
        yield data


async def _ending(question: Question, received: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> Ending:
    answers = Answers()
    seen = bytearray()
    try:
        async for data in received:
            seen += data
            answers.feed(data)
    except (ConnectionError, httptools.HttpParserError) as error:
        return Ending("broken", f"{error!r} after {bytes(seen[-500:])!r}")
    finally:
        writer.close()
    if (len(answers.statuses), len(answers.bodies)) != (1, 1):
        return Ending("broken", f"{len(answers.bodies)} answers in {bytes(seen[-500:])!r}")
    return _judged(question, answers.statuses[0], answers.bodies[0])


def _judged(question: Question, status: int, body: bytes) -> Ending:
    if status in question.errors:
        return Ending("error", str(status))
    if status == 200 and _is_failed_stream(body):
        return Ending("error", "stream")
    try:
        right = status == 200 and question.is_right(body)
    except (ValueError, KeyError, TypeError):
        right = False
    return Ending("answer") if right else Ending("wrong", f"status {status}, {body[-500:]!r}")


def _is_failed_stream(body: bytes) -> bool:
    """Return whether an event of an error of a documented kind is the last line of a stream."""
    try:
        last = json.loads(body.splitlines()[-1])
    except (ValueError, IndexError):
        return False
    return isinstance(last, dict) and last.get("code") in ERRORS


WAYS: list[Way] = [*[plainly] * 8, slowly_sending, slowly_reading, half_closing, half_closing, vanishing, vanishing]
