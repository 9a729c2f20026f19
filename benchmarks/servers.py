"""The servers that benchmarks start: each in processes of its own, on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from lmi_server.machine.ports import free_port
from lmi_server.processes.parents import end_with_parent

MODEL = Path("models/smollm2-135m-instruct")
NAME = MODEL.name.replace("-", "_")
"""The demo model, and the name under which it is served."""
ECHO = ("option.entryPoint=djl_python.echo", "job_queue_size=20000")
"""The serving.properties of a model that answers with the words of its prompt."""
PING = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_POLL_S = 0.02


S = TypeVar("S", bound="Server")


class UnavailableError(Exception):
    """A server cannot be installed or started, or does not answer."""


def is_answered(port: int, request: bytes = PING) -> bool:
    """Return whether a server on the port of this machine answers with 200."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(request)
        return b" 200 " in connection.recv(64)
    return False


class Server:
    """A server in its own session, with further `variables`; "{port}" in its command stands for its port.

    Its output goes to `log`, if there is one. `ready_s` is the time from its start to its first answer with 200, once
    `wait_until_ready` has seen that.
    """

    def __init__(self, *command: str, log: Path | None = None, **variables: str) -> None:
        self.port = free_port(None)
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_s = 0.0
        self._log = log
        self._began = time.perf_counter()
        with open(log, "wb") if log is not None else contextlib.nullcontext() as output:
            self._process = psutil.Popen(
                [part.replace("{port}", str(self.port)) for part in command],
                env=os.environ | variables, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def wait_until_ready(self, request: bytes = PING, limit_s: float = 600.0) -> None:
        """Wait until `request` is answered with 200. Raises UnavailableError with the end of the log."""
        while time.perf_counter() - self._began < limit_s:
            if self._process.poll() is not None:
                raise UnavailableError(f"the server exited with {self._process.returncode}{self._last_printed()}")
            if is_answered(self.port, request):
                self.ready_s = time.perf_counter() - self._began
                return
            time.sleep(_POLL_S)
        raise UnavailableError(f"the server did not answer within {limit_s:g} s{self._last_printed()}")

    def _last_printed(self) -> str:
        printed = "" if self._log is None else self._log.read_text(errors="replace").strip()
        return f"; the last that it printed:\n{printed[-3000:]}" if printed else ""

    def pids(self) -> list[int]:
        """Return the server's process and all below it."""
        found = [self._process.pid]
        for pid in found:  # which grows meanwhile; a child belongs to the thread that started it
            for thread in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):  # the thread has ended
                    found += map(int, thread.read_text().split())
        return found

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time so far of the server's process, and of all below it."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids()]
        own, *others = (each.user + each.system for each in times)
        return own, sum(others)

    def memory_mib(self, number: int = 0) -> float:
        """Return the resident memory of one of `pids`."""
        return float(psutil.Process(self.pids()[number]).memory_info().rss / 2**20)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # whatever the server left behind


@contextlib.contextmanager
def stopping(server: S) -> Iterator[S]:
    """Stop the server at the end of the block."""
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def started(*command: str, log: Path | None = None, **variables: str) -> Iterator[Server]:
    """Run a server; it may not be ready yet."""
    with stopping(Server(*command, log=log, **variables)) as server:
        yield server


@contextlib.contextmanager
def model_directory(*lines: str, name: str = "model", **options: object) -> Iterator[Path]:
    """Make the directory of a model; its serving.properties has these lines and options."""
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent, name)
        directory.mkdir()
        text = [*lines, *(f"option.{key}={value}" for key, value in options.items())]
        (directory / "serving.properties").write_text("\n".join(text) + "\n")
        yield directory


@contextlib.contextmanager
def serving(
    model: Path, places: int | None = None, *more: str, log: Path | None = None, **variables: str
) -> Iterator[Server]:
    """Serve a model by `lmi-server serve`, with `max_rolling_batch_size=places` if given; yield it once it is ready."""
    if places is not None:
        variables["OPTION_MAX_ROLLING_BATCH_SIZE"] = str(places)
    command = ("-m", "lmi_server", "serve", str(model), "--port", "{port}", "--log-level", "warning", *more)
    with started(sys.executable, *command, log=log, **variables) as server:
        server.wait_until_ready()
        yield server


@contextlib.contextmanager
def echo_server(**options: object) -> Iterator[Server]:
    """Serve the echo handler with these options, and a job queue for 20,000 requests."""
    with model_directory(*ECHO, name="echo", **options) as directory, serving(directory) as server:
        yield server
