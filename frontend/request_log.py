"""The access log: a line for each inference request, once its answer has ended.

On the event loop a line costs about half a microsecond: requests are put together, encoded by some dozens, while the
processor's caches still have them, and handed to the thread that writes the log a tenth of a second after the first of
them, since each record wakes that thread, which takes the interpreter from the loop. The lines are made there, or in
a process of their own if there are many. Headers, queries and bodies are not in a line; the body is, if `log_prompts`
asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

import msgspec

from frontend.line_process import LineProcess
from frontend.request_lines import Batches, lines_of
from frontend.request_record import EndedRequest
from frontend.server_log import WrittenLines
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.secrets import SECRETS

_LOGGER = "access"
_TOGETHER = 64  # requests
_MOST = 1 << 20  # bytes
_DELAY_S = 0.1
# Of as many requests in a tenth of a second the process makes the lines. Below them it would save the event loop less
# than one percent of its time, and it takes 20 MiB of memory.
_MANY = 256
_encode = msgspec.msgpack.Encoder().encode


class RequestLog:
    """Writes lines in one of the formats of `access_log`; with a `sample` below 1 only that share of the successes."""

    def __init__(self, format_name: str, sample: float) -> None:
        self._format = format_name
        self._sample = sample
        self._waiting: list[EndedRequest] = []
        self._batches: list[bytes] = []  # of requests that do not wait any more
        self._count = self._size = 0  # of their lines; of these batches, in bytes
        self._timer: asyncio.TimerHandle | None = None
        self._process = LineProcess()
        self._logger = logging.getLogger(_LOGGER)

    @classmethod
    def of(cls, settings: ServerSettings) -> RequestLog | None:
        """Return the log that the settings ask for, None for none."""
        return None if settings.access_log == "off" else cls(settings.access_log, settings.access_log_sample)

    def add(self, request: EndedRequest) -> None:
        """Write a line for a request, soon."""
        if self._sample < 1 and request.record.code < 400 and random.random() >= self._sample:
            return
        waiting = self._waiting
        waiting.append(request)
        if len(waiting) >= _TOGETHER:
            self._encode()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def _encode(self) -> None:
        batch = _encode(self._waiting)
        self._batches.append(batch)
        self._count += len(self._waiting)
        self._size += len(batch)
        self._waiting = []
        if self._size >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._encode()
        batches, count, size = self._batches, self._count, self._size
        self._batches, self._count, self._size = [], 0, 0
        if batches:
            work = Batches(self._format, time.time() - time.monotonic(), SECRETS.values, batches)
            self._logger.handle(WrittenLines(_LOGGER, _RequestLines(work, count, size, self._process)))

    def close(self) -> None:
        """Write what waits, and end the process that makes lines."""
        self.flush()
        self._process.end()


class _RequestLines:
    """Lines that are made of requests when they are written."""

    def __init__(self, work: Batches, count: int, size: int, process: LineProcess) -> None:
        self.count = count
        self.size = size
        self._work = work
        self._process = process

    def __str__(self) -> str:
        made = self._process.lines_of(self._work) if self.count >= _MANY else None
        return lines_of(self._work) if made is None else made
