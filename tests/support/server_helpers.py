"""A server process, and raw connections to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from forked_servers import ForkedServer
from model_directories import write_properties
from paths import TESTS
from process_log import LIMIT_S, ProcessLog
from processes import worker_of
from relay_helpers import FAULTS, HANDLERS
from waiting import wait_until


class Server:
    """A server process on a port that the system chose; `arguments` are those of fault_server.py.

    Its workers are forks that have imported `libraries`, as in ForkedServer; "" starts them as a server of users does.
    """

    def __init__(
        self, *arguments: str | Path, variables: dict[str, str] | None = None, libraries: str = "worker"
    ) -> None:
        path = {"PYTHONPATH": os.pathsep.join([HANDLERS, str(TESTS.parent)])}
        self.process = ForkedServer([*map(str, arguments)], os.environ | (variables or {}) | path, libraries)
        self._log = ProcessLog(self.process.stderr)
        self.lines = self._log.lines
        self.port = int(self.log_line(r"listening on http://127\.0\.0\.1:(\d+)")[1])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=LIMIT_S)
        self.clients = contextlib.ExitStack()  # others, closed when the server has ended

    def log_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log and return its match."""
        return self._log.wait_for(pattern)

    def loaded_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log as log_line does; fail with the reason once a model could not be loaded."""
        found = self.log_line(rf"{pattern}|could not be loaded: (?P<reason>.*)")
        assert found["reason"] is None, found["reason"]
        return found

    def worker_pid(self) -> int:
        return worker_of(self.process.pid)

    def metric(self, name: str, model: str = "model") -> float | None:
        """Return a gauge or counter; None if there is none, as for those of a handler while no worker is ready."""
        pattern = rf'^{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$'
        found = re.search(pattern, self.http.get("/metrics").text, re.MULTILINE)
        return None if found is None else float(found[1])

    def described(self, model: str = "model") -> dict[str, Any]:
        """Return what the management API says of a model."""
        (element,) = self.http.get(f"/models/{model}").json()
        (found,) = element["models"]
        return dict(found)

    def until(self, name: str, value: float, model: str = "model") -> None:
        """Ask for a metric until it has this value."""
        wait_until(lambda: self.metric(name, model) == value, f"{name} is {value}")

    def until_positive(self, name: str, model: str = "model") -> None:
        """Ask for a counter until it is more than 0."""
        wait_until(lambda: self.metric(name, model), f"{name} is more than 0")

    def invoke(self, prompt: str, tokens: int = 3, stream: bool = False, **more: Any) -> httpx.Response:
        return self.http.post("/invocations", json=request(prompt, tokens, stream), **more)

    def stop(self) -> int:
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        self.clients.close()
        self.http.close()
        self._log.close()
        return self.process.wait(LIMIT_S)


def make_model(directory: Path, handler: str = FAULTS, **options: Any) -> Path:
    """Make a model directory with these options; those of the model server itself are not "option."."""
    directory.mkdir(parents=True)
    return write_properties(directory, **{"entryPoint": "djl_python.echo", "test_handler": handler, **options})


@contextlib.contextmanager
def running(
    *arguments: str | Path, variables: dict[str, str] | None = None, libraries: str = "worker", workers: int = 0
) -> Iterator[Server]:
    """Start a server and stop it at the end; `workers` are ready before anything else."""
    server = Server(*arguments, variables=variables, libraries=libraries)
    try:
        for _ in range(workers):
            server.log_line(r"\] ready: process")
        yield server
    finally:
        if server.process.returncode is None:
            server.stop()


@contextlib.contextmanager
def serving(
    directory: Path,
    handler: str = FAULTS,
    ready: bool = True,
    variables: dict[str, str] | None = None,
    libraries: str = "worker",
    **options: Any,
) -> Iterator[Server]:
    """Serve a model named "model", which is in directory / "model"."""
    model = make_model(directory / "model", handler, **options)
    with running(model, variables=variables, libraries=libraries, workers=int(ready)) as server:
        yield server


def request(prompt: str, tokens: int = 3, stream: bool = False) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens}, "stream": stream}


def raw_request(
    prompt: str, tokens: int = 3, stream: bool = False, close: bool = False, path: str = "/invocations"
) -> bytes:
    body = json.dumps(request(prompt, tokens, stream)).encode()
    connection = "connection: close\r\n" if close else ""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{connection}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
    connection.sendall(data)
    return connection


def received(connection: socket.socket, until: bytes = b"") -> bytes:
    """Return what arrives until `until` is in it, or to the end."""
    data = bytearray()
    while not (until and until in data):
        part = connection.recv(65536)
        if not part:
            break
        data += part
    return bytes(data)
