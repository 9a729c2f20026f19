"""The server that `tune` and `verify` start, as a fork of the command: it costs no imports. For tests only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forked_workers import be_command

from lmi_server.client import trial_server


class ForkedTrialServer:
    """A fork that runs `lmi-server`, with what lmi_server/client/trial_server.py uses of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with log.open("ab") as output:
            self.pid = os.fork()
            if self.pid == 0:
                be_command(arguments, output.fileno())
        self._ended = os.pidfd_open(self.pid)
        self._returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("lmi-server serve", timeout or 0)
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ended)
        return self._returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)


def install() -> None:
    """From now on, a trial server of this process is a fork of it."""
    trial_server._start = _start  # type: ignore[assignment]


def _start(port: int, log: Path) -> ForkedTrialServer:
    return ForkedTrialServer(["serve", "--host", "127.0.0.1", "--port", str(port)], log)
