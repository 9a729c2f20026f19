"""The access log: a line for each inference request, once its answer has ended.

The event loop makes the lines, which takes about two microseconds for each. The thread that writes the log gets them a
fifth of a second after the first of them, since each record wakes that thread, which takes the interpreter from the
loop. Headers, queries and bodies are not in a line; the body is, if `log_prompts` asks for it.
"""

from __future__ import annotations

import asyncio
import logging

from frontend.observability.idle_calls import call_when_idle
from frontend.observability.request_lines import RequestLines
from frontend.observability.server_log import WrittenLines
from lmi_server.configuration.server_settings import ServerSettings

_LOGGER = "access"
_MAX = 1 << 20  # bytes
_DELAY_S = 0.2


class RequestLog:
    """Writes lines in one of the formats of `access_log`; with a `sample` below 1 only that share of the successes."""

    def __init__(self, format_name: str, sample: float) -> None:
        self._format = format_name
        self._sample = sample
        self._lines: RequestLines | None = None  # that wait to be written
        self._timer: asyncio.TimerHandle | None = None
        self._logger = logging.getLogger(_LOGGER)

    @classmethod
    def of(cls, settings: ServerSettings) -> RequestLog | None:
        """Return the log that the settings ask for, None for none."""
        return None if settings.access_log == "off" else cls(settings.access_log, settings.access_log_sample)

    def lines(self) -> RequestLines:
        """Return the lines that wait to be written, for more of them; call `added` behind them."""
        lines = self._lines
        if lines is None:
            lines = self._lines = RequestLines(self._format, self._sample)
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, call_when_idle, self.flush)
        return lines

    def added(self) -> None:
        """Write what was added to `lines`, soon."""
        if self._lines is not None:
            self._lines.encode()
            if self._lines.size >= _MAX:
                self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.encode()
            if lines.count:
                self._logger.handle(WrittenLines(_LOGGER, lines))
