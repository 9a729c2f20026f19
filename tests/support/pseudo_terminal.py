"""`lmi-server` in a terminal of its own, as a user sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])")


class PseudoTerminal:
    """A command whose standard files are a terminal of this size."""

    def __init__(self, arguments: list[str], variables: Mapping[str, str], columns: int, rows: int) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # A session of its own, whose terminal this one is: Ctrl-C that is typed becomes a signal.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmi_server", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**variables, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.shown = ""  # without escape sequences

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, text: str, limit_s: float = 120.0, keys: str = "") -> str:
        """Read until `text` was shown; return what was shown since the last call, to the end of `text`.

        `keys` are typed whenever nothing is shown for a second.
        """
        deadline = time.monotonic() + limit_s
        while text not in self.shown:
            assert time.monotonic() < deadline, f"the terminal does not show {text!r}: {self.shown!r}"
            if select.select([self._ours], [], [], 1.0)[0]:
                self.shown = _ESCAPES.sub("", self.shown + os.read(self._ours, 65536).decode("utf-8", "replace"))
            elif keys:
                self.type(keys)
        found, _, self.shown = self.shown.partition(text)
        return found + text

    def ended(self) -> int:
        """Return the exit code; what is still shown is read, so that nothing blocks."""
        with contextlib.suppress(OSError):  # EIO at the end
            while os.read(self._ours, 65536):
                pass
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that runs the tests in the background has it ignored


@contextlib.contextmanager
def terminal(
    *arguments: str, variables: Mapping[str, str], columns: int = 160, rows: int = 24
) -> Iterator[PseudoTerminal]:
    """Run `lmi-server` with these arguments in a terminal; it has ended at the end."""
    running = PseudoTerminal([*arguments], variables, columns, rows)
    try:
        yield running
    finally:
        running.close()
