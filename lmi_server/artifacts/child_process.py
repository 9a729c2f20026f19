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
from typing import IO

from lmi_server.artifacts.progress import Activity

_POLL_S = 0.2
_KEPT_BYTES = 1 << 20
_MAX_ON_DISK = 64 << 20


class ChildTimeoutError(Exception):
    """The program did not end within its time."""


@dataclass(frozen=True, slots=True)
class ChildResult:
    """Exit code of a program that has ended, and its output, or the last MiB of it."""

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
    whole_output: bool = False,
) -> ChildResult:
    """Run `command`, call `on_tick` every 0.2 seconds, and return how it ended.

    The child inherits the open descriptors `inherited`. With `whole_output`, all of its standard output is returned.
    Raises ChildTimeoutError after `limit_s` seconds, OSError if the program cannot be started, and ArtifactError if
    the activity is cancelled; the program is killed in each case.
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

        def tick() -> None:
            on_tick()
            for file in (problems,) if whole_output else (out, problems):
                _bound(file)

        try:
            code = _wait(process, activity, limit_s, tick)
        finally:
            _kill(process)
        return ChildResult(code, _end(out, None if whole_output else _KEPT_BYTES), _end(problems, _KEPT_BYTES))


def _bound(file: IO[bytes]) -> None:
    """Give back what a file takes of the disk if that is too much. The program goes on to write behind a hole."""
    if os.fstat(file.fileno()).st_blocks * 512 > _MAX_ON_DISK:
        os.ftruncate(file.fileno(), 0)


def _end(file: IO[bytes], kept: int | None) -> str:
    """Return the last `kept` bytes of a file as text; all of them if it is None."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0 if kept is None else max(0, size - kept))
    return file.read().lstrip(b"\0").decode(errors="replace")


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
