"""The thread that makes lines of captured exchanges and keeps them: no request waits for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection

from frontend.capture.destinations import Destination, LostError
from frontend.capture.exchange import CapturedExchange
from frontend.capture.lines import captured_line

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_REPORT_S = 60.0  # between two lines of the log about exchanges that are lost


class CaptureWriter:
    """Writes exchanges in the order of their ends.

    Each is counted once: it is `written` when it is kept, `failed` if the disk or S3 did not take it, and `dropped` if
    there was no memory for it. `failures` counts the writes that failed, each perhaps of many exchanges.
    """

    def __init__(self, destination: Destination, redacted: Collection[str]) -> None:
        self.written = self.dropped = self.failed = self.failures = 0
        self._destination = destination
        self._redacted = redacted
        self._queue: deque[CapturedExchange] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._reported = -_REPORT_S
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def add(self, exchange: CapturedExchange) -> None:
        """Have an exchange written, unless its memory was refused."""
        if exchange.is_lost or self._closing:
            exchange.release()
            self.dropped += 1
            self._report("capture_memory has no room for more")
            return
        with self._wake:
            self._queue.append(exchange)
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Write what waits, within `timeout_s` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait():
            while self._queue:
                self._write(self._queue.popleft())
            self._flush(now=False)
        self._flush(now=True)

    def _wait(self) -> bool:
        """Wait for an exchange, or a second; return False once all is written and no more come."""
        with self._wake:
            if not self._queue and not self._closing:
                self._wake.wait(_PAUSE_S)
            return bool(self._queue) or not self._closing

    def _write(self, exchange: CapturedExchange) -> None:
        try:
            self.written += self._destination.write(captured_line(exchange, self._redacted))
        # The border to disks and networks, and to bodies of clients: one exchange is lost, and the thread goes on.
        except Exception as error:  # noqa: BLE001
            self._fail(error, 1)
        finally:
            exchange.release()

    def _flush(self, now: bool) -> None:
        try:
            self.written += self._destination.flush(now)
        except Exception as error:  # noqa: BLE001 - the border to disks and networks
            self._fail(error, 0)

    def _fail(self, error: Exception, count: int) -> None:
        """Count the exchanges that a failed write has lost, `count` if it does not say how many."""
        self.failures += 1
        self.failed += error.count if isinstance(error, LostError) else count
        self._report(str(error))

    def _report(self, reason: str) -> None:
        if time.monotonic() - self._reported >= _REPORT_S:
            self._reported = time.monotonic()
            logger.warning("captured requests are lost, %d so far: %s", self.dropped + self.failed, reason)
