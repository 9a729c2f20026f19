"""What is told of each request beside the metrics: the access log and traces, as far as settings ask for them."""

from __future__ import annotations

from frontend.request_log import RequestLog
from frontend.request_record import EndedRequest
from frontend.tracing import RequestTrace, Tracing
from lmi_server.configuration.server_settings import ServerSettings


class RequestReports:
    """The access log and the traces; either may be off."""

    def __init__(self, log: RequestLog | None, tracing: Tracing | None) -> None:
        self._log = log
        self._tracing = tracing
        # Returns the span of a request with these headers, None if it is not traced.
        self.begin = _untraced if tracing is None else tracing.begin

    @classmethod
    def of(cls, settings: ServerSettings) -> RequestReports | None:
        """Return what the settings ask for, None if that is nothing. Raises ConfigurationError."""
        log, tracing = RequestLog.of(settings), Tracing.of(settings)
        return None if log is None and tracing is None else cls(log, tracing)

    def ended(self, request: EndedRequest, trace: RequestTrace | None) -> None:
        """Report a request that has ended."""
        if trace is not None and self._tracing is not None:
            self._tracing.ended(trace, request)
        if self._log is not None:
            self._log.add(request)

    def flush(self) -> None:
        """Write what waits for the log."""
        if self._log is not None:
            self._log.flush()

    async def close(self) -> None:
        """Write and send what waits."""
        if self._log is not None:
            self._log.close()
        if self._tracing is not None:
            await self._tracing.close()


def _untraced(properties: dict[str, str]) -> RequestTrace | None:
    return None
