"""Follows a page of docs/ as a reader does: each block ```sh in a shell, each block ```text as what it prints.

A line that starts a server (`make run`, `lmi-server serve`) runs in a terminal of its own until the next one starts.
The blocks after it run once the server is ready. In a ```text block `...` stands for anything within a line.

`lmi-server serve` is a fork of a process that has imported transformers; all other commands run in a shell.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
from forked_servers import ForkedCommandWithLog
from waiting import wait_until

LIMIT_S = 300

_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVES = re.compile(r"(make run|lmi-server serve)\b")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return kind and text of each block that is run or compared."""
    return _BLOCK.findall(page)


class Reader:
    """Follows pages in a directory, with a server's port in the place of 8080.

    `prepare` is called with the working directory before a server starts.
    """

    def __init__(self, directory: Path, port: int, prepare: Callable[[Path], None]) -> None:
        self.directory = directory
        self._port = port
        self._prepare = prepare
        self._log = (directory / "log").open("wb")
        self._server: subprocess.Popen[bytes] | ForkedCommandWithLog | None = None
        self._printed = ""
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": commands, "PORT": str(port), "SERVING_PORT": str(port)}

    def follow(self, page: str, replaced: Mapping[str, str] = {}) -> None:
        """Do what the page says; raises AssertionError with the block that does not do what it should."""
        for kind, text in blocks_of(page):
            for old, new in {"127.0.0.1:8080": f"127.0.0.1:{self._port}", **replaced}.items():
                text = text.replace(old, new)
            if kind == "text":
                self._compare(text)
            else:
                self._run(text)

    def _run(self, block: str) -> None:
        *lines, last = block.splitlines()
        serves = _SERVES.match(last) is not None
        place = self.directory / "working-directory"
        script = "\n".join((*lines, *(() if serves else (last,)), f"pwd > {place}"))
        where = Path(place.read_text().strip()) if place.exists() else self.directory
        # check ends with 1 if something is wrong, which a page may show.
        command = ["bash", "-uo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=where, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        self._printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{block}\n{self._printed}"
        if serves:
            self._serve(last, Path(place.read_text().strip()))

    def _serve(self, command: str, where: Path) -> None:
        self.stop()
        self._prepare(where)
        program, *arguments = shlex.split(command)
        if program == "lmi-server":
            log = self._log.fileno()
            self._server = ForkedCommandWithLog(arguments, self._environment, where, log, "transformers")
        else:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=where,
                env=self._environment,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
        wait_until(self._is_ready, f"ready: {command}", LIMIT_S)

    def _is_ready(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, Path(self._log.name).read_text()[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/ping", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def _compare(self, expected: str) -> None:
        for line in expected.splitlines():
            pattern = ".*".join(map(re.escape, line.split("...")))
            assert re.search(f"^{pattern}", self._printed, re.MULTILINE), f"no line {line!r} in:\n{self._printed}"

    def stop(self) -> None:
        """End the server as Ctrl-C in its terminal does."""
        if self._server is not None:
            self._signal(signal.SIGINT)
            try:
                self._server.wait(60)
            finally:
                if self._server.poll() is None:
                    self._signal(signal.SIGKILL)
            self._server = None

    def _signal(self, number: int) -> None:
        if isinstance(self._server, ForkedCommandWithLog):
            self._server.send_signal(number)
        elif self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, number)


@contextlib.contextmanager
def reading(directory: Path, port: int, prepare: Callable[[Path], None] = lambda _: None) -> Iterator[Reader]:
    """Give a reader; its server ends with the block."""
    reader = Reader(directory, port, prepare)
    try:
        yield reader
    finally:
        reader.stop()
        reader._log.close()
