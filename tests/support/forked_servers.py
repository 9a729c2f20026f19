"""Servers, commands and workers as forks of one process that has imported everything: one more costs no imports."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import cpu_times
import xdist_forks
from forked_process import as_process
from paths import TESTS
from process_log import LIMIT_S
from xdist_forks import TEMPLATE_PATHS

from lmi_server.supervisor.launch import worker_launch as launch

SCRIPT = TESTS / "models" / "fault_server.py"


class _Forked:
    """A fork of the template, with what the tests use of subprocess.Popen."""

    def __init__(
        self,
        what: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        directory: str,
        outputs: Sequence[int],
        libraries: str = "",
    ) -> None:
        self._template = _template(libraries)
        try:
            self.pid = self._template.fork(what, arguments, variables, directory, outputs)
        finally:
            for descriptor in outputs:
                os.close(descriptor)
        self._ended = os.pidfd_open(self.pid)  # the template keeps the exit code until it is asked for it
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(SCRIPT), timeout or 0)
            self.returncode = self._template.exit_code(self.pid)
            os.close(self._ended)
        return self.returncode


class ForkedServer(_Forked):
    """Runs fault_server.py; its workers are forks too, with `libraries`, a name of tests/models/forked_workers.py."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str], libraries: str = "") -> None:
        reading, writing = os.pipe()
        self.stderr: IO[str] = os.fdopen(reading)
        super().__init__("server", arguments, variables, os.getcwd(), [writing], libraries)


class ForkedCommand(_Forked):
    """Runs `lmi-server` in `directory`, with these variables and no others; `libraries` as in ForkedServer."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: Path, libraries: str = ""
    ) -> None:
        output, errors = os.pipe(), os.pipe()
        self.stdout: IO[str] = os.fdopen(output[0])
        self.stderr: IO[str] = os.fdopen(errors[0])
        super().__init__("command", arguments, variables, str(directory), [output[1], errors[1]], libraries)


class ForkedCommandWithLog(_Forked):
    """Runs `lmi-server` as ForkedCommand does; what it prints goes to the file descriptor `log`."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: Path, log: int, libraries: str
    ) -> None:
        super().__init__("command", arguments, variables, str(directory), [os.dup(log), os.dup(log)], libraries)


class ForkedPython(_Forked):
    """Runs `python` with these arguments and variables, as the leader of a session; `libraries` as in ForkedServer.

    What it prints as errors goes to the file descriptor `errors`, by default to `stdout`.
    """

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], libraries: str, errors: int | None = None
    ) -> None:
        given, printed = os.pipe(), os.pipe()
        self.stdin: IO[str] = os.fdopen(given[1], "w")
        self.stdout: IO[str] = os.fdopen(printed[0])
        files = [given[0], printed[1], os.dup(printed[1] if errors is None else errors)]
        super().__init__("python", arguments, variables, os.getcwd(), files, libraries)


def run_command(
    *arguments: str, env: Mapping[str, str], cwd: Path, libraries: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `lmi-server` with these arguments and variables, and return what it has printed.

    `libraries` as in ForkedServer; with "tune" the servers that the command starts are forks, too.
    """
    return _run("command", arguments, env, str(cwd), [], libraries)


def run_python(
    arguments: Sequence[str], env: Mapping[str, str], libraries: str = "", limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run `python` with these arguments as subprocess.run does, as a fork; `libraries` as in ForkedServer."""
    return _run("python", arguments, env, os.getcwd(), [os.open(os.devnull, os.O_RDONLY)], libraries, limit_s)


def _run(
    what: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    directory: str,
    inputs: Sequence[int],
    libraries: str,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a fork to its end. After `limit_s` it is killed, and TimeoutExpired has what it has printed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:

        def printed() -> list[str]:
            files = (output, errors)
            return [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in files]

        files = [*inputs, os.dup(output.fileno()), os.dup(errors.fileno())]
        process = _Forked(what, arguments, env, directory, files, libraries)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as late:
            process.kill()
            process.wait(LIMIT_S)
            raise subprocess.TimeoutExpired(list(arguments), limit_s, *printed()) from late
        return subprocess.CompletedProcess(arguments, code, *printed())


@contextlib.contextmanager
def forked_workers(libraries: str = "worker") -> Iterator[None]:
    """Have the pools of this process start their workers as forks: for tests of what comes after the start.

    `libraries` as in ForkedServer.
    """
    spawn, launch._execute = launch._execute, functools.partial(fork_worker, libraries=libraries)
    try:
        yield
    finally:
        launch._execute = spawn


def parent_of_workers() -> int:
    """Return the process whose forks the workers are with `forked_workers`."""
    return _template("worker").pid


async def fork_worker(
    command: Sequence[str], variables: Mapping[str, str], inherited: Sequence[int] = (), libraries: str = "worker"
) -> Process:
    """Start the worker that `command` starts, as a fork; it has `variables` beside those of this process."""
    template = _template(libraries)
    (stdout, of_stdout), (stderr, of_stderr) = os.pipe(), os.pipe()
    outputs = [of_stdout, of_stderr]
    try:
        pid = template.fork("worker", command, {**os.environ, **variables}, os.getcwd(), outputs, inherited)
    finally:
        for descriptor in outputs:
            os.close(descriptor)
    return await as_process(pid, stdout, stderr, lambda: template.exit_code(pid))


class _Template:
    """The process that forks; it ends with this one. With `libraries` it is a fork itself of the one without."""

    def __init__(self, libraries: str) -> None:
        self._lock = threading.Lock()
        variables = os.environ | TEMPLATE_PATHS
        if not libraries and xdist_forks.template_socket:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection.connect(xdist_forks.template_socket)
            self.pid = self._answer()
            cpu_times.count_beside(self.pid)
            return
        self._connection, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            if libraries:
                self.pid = _template("").fork("template", [libraries], variables, os.getcwd(), [others.fileno()])
            else:
                command = [sys.executable, str(SCRIPT), "--template", str(others.fileno())]
                self._process = subprocess.Popen(command, env=variables, pass_fds=[others.fileno()])
                self.pid = self._process.pid

    def fork(
        self,
        what: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        directory: str,
        outputs: Sequence[int],
        inherited: Sequence[int] = (),
    ) -> int:
        """Return the process id of a fork, whose last outputs (standard output, standard error) are these files."""
        asked = {"what": what, "arguments": arguments, "variables": dict(variables), "directory": directory}
        asked["inherited"] = inherited
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(asked).encode()], [*inherited, *outputs])
            return self._answer()

    def exit_code(self, pid: int) -> int:
        """Wait for the end of a fork and return its exit code, as Popen does: minus the signal that ended it."""
        with self._lock:
            self._connection.send(json.dumps({"ended": pid}).encode())
            return self._answer()

    def _answer(self) -> int:
        answer = self._connection.recv(64)
        assert answer, "the process that forks servers has ended"
        return int(answer)


@functools.cache
def _template(libraries: str) -> _Template:
    return _Template(libraries)
