"""A process that a Ray actor starts, and the lines between the two (`lmi_server.ray.messages`)."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, cast

import msgspec

from lmi_server.machine.environment import process_environment
from lmi_server.ray.messages import line

logger = logging.getLogger(__name__)


class Child:
    """The process. The pipe to it is its lease: it ends when the actor does, however that happens.

    `variables` are added to the environment. `on_line` gets what it writes, and may raise msgspec.DecodeError; `on_end`
    gets its exit code. Both are called in a thread.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        on_line: Callable[[bytes], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**process_environment(), **variables},
        )
        self._on_line = on_line
        self._on_end = on_end
        threading.Thread(target=self._read, name="child", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message. It is dropped if the process has ended, or `end` was called."""
        data = line(message)
        pipe = cast("IO[bytes]", self._process.stdin)
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: another thread has closed the pipe
            pipe.write(data)
            pipe.flush()

    def end(self, limit_s: float) -> None:
        """Close the pipe and wait for the end; kill the process after `limit_s` seconds."""
        with contextlib.suppress(BrokenPipeError):
            cast("IO[bytes]", self._process.stdin).close()
        self.wait(limit_s)

    def wait(self, limit_s: float) -> None:
        """Wait for the end of the process; kill it after `limit_s` seconds."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        with cast("IO[bytes]", self._process.stdout) as output:
            for text in output:
                try:
                    self._on_line(text)
                except msgspec.DecodeError as error:  # what a library prints; the end of the process must be heard
                    logger.warning("process %d wrote %r, which is no message: %s", self.pid, text[:200], error)
        self._on_end(self._process.wait())
