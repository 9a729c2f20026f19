"""The product as its users start it: `lmi-server serve` on a model directory, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from forked_servers import ForkedCommand
from model_directories import write_properties
from process_log import LIMIT_S, ProcessLog
from processes import worker_of
from waiting import wait_until

COMMANDS = Path(sys.executable).parent


class Server:
    """`lmi-server serve` in a process of its own, ready to answer.

    With `libraries`, as in ForkedCommand, it and its workers are forks that have imported these: for tests of what
    comes after the start.
    """

    def __init__(
        self,
        directory: Path,
        commands: Path = COMMANDS,
        variables: Mapping[str, str] = os.environ,
        libraries: str = "",
    ) -> None:
        arguments = ["serve", str(directory), "--port", "0"]
        self.process: subprocess.Popen[str] | ForkedCommand = (
            ForkedCommand(arguments, variables, Path.cwd(), libraries)
            if libraries
            else subprocess.Popen(
                [str(commands / "lmi-server"), *arguments], stderr=subprocess.PIPE, text=True, env=dict(variables)
            )
        )
        self._log = ProcessLog(self.process.stderr)
        self.lines = self._log.lines
        try:
            self.url = self.log_line(r"listening on (http://\S+)")[1]
            line = self.log_line(r"\] ready: process|could not be loaded: .*")
            assert "could not" not in line[0], line.string
        except AssertionError:  # it would take the processor from the tests that follow
            self.process.kill()
            self._close_output()
            self.process.wait(LIMIT_S)
            raise
        self.model = directory.name.replace("-", "_")
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S)
        self.clients = contextlib.ExitStack()  # others, closed with the server

    def log_line(self, pattern: str, limit_s: float = LIMIT_S) -> re.Match[str]:
        return self._log.wait_for(pattern, limit_s)

    def gauge(self, name: str) -> float | None:
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return None if found is None else float(found[1])

    def wait_for(self, name: str, value: float) -> None:
        wait_until(lambda: self.gauge(name) == value, f"{name} is {value}")

    def worker_pid(self) -> int:
        return worker_of(self.process.pid)

    def stop(self) -> int:
        self.http.close()
        self.clients.close()
        self.process.terminate()
        self._close_output()
        return self.process.wait(LIMIT_S)

    def _close_output(self) -> None:
        self._log.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def serving(
    parent: Path, model: Path, code: str | None = None, libraries: str = "", **options: str
) -> Iterator[Server]:
    """Serve a model from a directory whose serving.properties has these options, and whose model.py is `code`.

    `libraries` are those of Server. Their names are those of write_properties.
    """
    directory = write_properties(parent / "model", **{"model_id": str(model), **options})
    if code is not None:
        (directory / "model.py").write_text(code)
    with running(Server(directory, libraries=libraries)) as server:
        yield server


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Give `server` and stop it at the end, unless the test has."""
    try:
        yield server
    finally:
        if server.process.returncode is None:
            assert server.stop() == 0
