"""Runs a program that fetches or installs: with a time limit, and killed together with its own children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_server.artifacts.progress import Activity

_POLL_S = 0.2


class ChildTimeoutError(Exception):
    """The program did not end within its time."""


@dataclass(frozen=True, slots=True)
class ChildResult:
    """Exit code and output of a program that has ended."""

    code: int
    stdout: str
    stderr: str


def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    activity: Activity,
    directory: Path | None = None,
    stdin: str = "",
    limit_s: float | None = None,
    inherited: Sequence[int] = (),
    on_tick: Callable[[], None] = lambda: None,
) -> ChildResult:
    """Run `command`, call `on_tick` every 0.2 seconds, and return how it ended.

    The child inherits the open descriptors `inherited`. Raises ChildTimeoutError after `limit_s` seconds, OSError if
    the program cannot be started, and ArtifactError if the activity is cancelled; the program is killed in each case.
    """
    # Files, not pipes: a pipe that is not read fills up and stops the program.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as problems:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=out,
            stderr=problems,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,  # a process group of its own, which `_kill` ends as a whole
            pass_fds=inherited,
        )
        try:
            code = _wait(process, activity, limit_s, on_tick)
        finally:
            _kill(process)
        out.seek(0)
        problems.seek(0)
        return ChildResult(code, out.read().decode(errors="replace"), problems.read().decode(errors="replace"))


def _wait(
    process: subprocess.Popen[bytes], activity: Activity, limit_s: float | None, on_tick: Callable[[], None]
) -> int:
    ends_at = None if limit_s is None else time.monotonic() + limit_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
        activity.check()
        on_tick()
        if ends_at is not None and time.monotonic() > ends_at:
            raise ChildTimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
