"""A router process, and fake servers of models behind it that do what a request says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from process_log import LIMIT_S, ProcessLog

EVENTS = [b'data: {"n": %d}\n\n' % number for number in range(5)]
USAGE = b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\ndata: [DONE]\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LATER = b'{"error": {"message": "later"}}'
_HOPS = b"connection: keep-alive, x-secret\r\nx-secret: 1\r\nkeep-alive: timeout=9\r\nupgrade: h2c\r\nx-kept: 1\r\n"


def _whole(body: bytes) -> bytes:
    return _HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


# What requests may ask for that is always the same: bytes, and whether another request may follow.
_PLAIN = {
    "half": (_STREAM + b"%x\r\n%b\r\n" % (len(EVENTS[0]), EVENTS[0]), False),
    "short": (_HEAD + b"content-length: 100\r\n\r\n{", False),
    "die": (b"", False),
    "garbage": (b"\x00\xff SSH-2.0 no HTTP here\r\n\r\n" * 10, True),
    "both": (_HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", True),
    "many_headers": (_HEAD + b"".join(b"x-%d: 1\r\n" % number for number in range(2000)) + b"\r\n", False),
    "two": (_whole(b'{"answer": 1}') + _whole(b'{"answer": "of another request"}'), True),
    "hints": (b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + _whole(b'{"answer": 1}'), True),
    "hops": (_HEAD + _HOPS + b"server: fake\r\ncontent-length: 2\r\n\r\n{}", True),
    "busy": (b"HTTP/1.1 429 X\r\nretry-after: 9\r\ncontent-length: %d\r\n\r\n%b" % (len(_LATER), _LATER), True),
    "upgrade": (b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", True),
}

_TURNS = 10  # of the event loop, in which connections that have just come begin


@dataclass
class Asked:
    """A request as a fake server got it."""

    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass
class FakeServer:
    """A server of models. `do` in a request says how it answers; `gone` counts connections that clients closed."""

    models: Sequence[Mapping[str, str]] = ({"id": "model"},)
    health: int = 200
    asked: list[Asked] = field(default_factory=list)
    gone: int = 0
    checks: int = 0
    port: int = 0
    wait: threading.Event = field(default_factory=threading.Event)  # that "wait" goes on

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return len(self._writers)

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 20))
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """End as a process that is killed: no connection is closed in order."""

        async def kill() -> None:
            # asyncio loses a connection that it has accepted, and that is no transport yet when its server is closed.
            for listening in self._server.sockets:
                self._loop.remove_reader(listening.fileno())
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()

        self._call(kill())

    def close(self) -> None:
        self.wait.set()
        self.kill()

        async def end() -> None:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for _ in range(_TURNS):  # in which transports are closed
                for writer in list(self._writers):
                    writer.transport.abort()
                await asyncio.sleep(0)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        self._tasks.discard(task)
        self._writers.discard(writer)
        writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether another may follow."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        asked = Asked(lines[0].split()[1], headers, b"")
        asked.body = await reader.readexactly(int(asked.header("content-length") or 0))
        if asked.path == "/health":
            self.checks += 1
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.health)
            return True
        if asked.path == "/v1/models":
            writer.write(_whole(json.dumps({"data": self.models}).encode()))
            return True
        self.asked.append(asked)
        try:
            do = asked.fields.get("do", "echo")
        except ValueError:
            do = "echo"
        if do in _PLAIN:
            data, goes_on = _PLAIN[do]
            writer.write(data)
            await writer.drain()
            return goes_on
        return bool(await getattr(self, f"_do_{do}")(asked, reader, writer))

    # --- what a request may ask for ---

    async def _do_echo(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        usage = b'{"server": %d, "usage": {"prompt_tokens": 7, "completion_tokens": 5}}' % self.port
        writer.write(_whole(usage))
        return True

    async def _do_stream(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(_STREAM)
        for event in (*EVENTS, USAGE):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        return True

    async def _do_wait(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while not self.wait.is_set():
            if reader.at_eof():
                self.gone += 1
                return False
            await asyncio.sleep(0.01)
        return await self._do_echo(asked, reader, writer)

    async def _do_endless(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(_STREAM)
        try:
            while not reader.at_eof():
                writer.write(b"%x\r\n%b\r\n" % (len(EVENTS[0]), EVENTS[0]))
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            self.gone += 1
        return False

    async def _do_long_head(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(_HEAD + b"x-long: ")
        while not reader.at_eof():
            writer.write(b"a" * 65536)
            await writer.drain()
        return False

    async def _do_trailers(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(_STREAM + b"%x\r\n%b\r\n0\r\n" % (len(EVENTS[0]), EVENTS[0]))
        while not reader.at_eof():
            writer.write(b"x-trailer: 1\r\n" * 1000)
            await writer.drain()
        return False

    async def _do_until_close(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(_HEAD + b"\r\n" + b'{"answer": "to the end"}')
        await writer.drain()
        writer.write_eof()
        await reader.read()
        return False


class Router:
    """`lmi-server route` on a port that the system chose."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "lmi_server", "route", *arguments, "--port", "0", "--check-interval", "0.1"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.is_ending = False
        self.log = ProcessLog(self.process.stderr)
        self.url = self.log.wait_for(r"ready: API ([^\s,;]+)")[1]
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S)

    def chat(self, do: str = "echo", model: str = "model", key: str | None = None, **fields: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "do": do, **fields}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def servers(self) -> dict[str, dict[str, Any]]:
        """Return the state of each server by its URL."""
        return {each["url"]: each for each in self.http.get("/route/servers").json()["servers"]}

    def stop(self) -> int:
        if not self.is_ending:
            self.process.terminate()
        code = self.process.wait(LIMIT_S)
        self.http.close()
        self.log.close()
        return code


@contextlib.contextmanager
def routing(*arguments: str) -> Iterator[Router]:
    """Run a router; its end must be in order."""
    router = Router(*arguments)
    try:
        yield router
    finally:
        code = router.stop()
    assert code == 0


@contextlib.contextmanager
def fakes(count: int, **fields: Any) -> Iterator[list[FakeServer]]:
    servers = [FakeServer(**fields) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
