"""Tells metrics, access log and traces of each request that has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from frontend.http.clients import Scope
from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import Metrics
from frontend.observability.request_log import RequestLog
from frontend.observability.request_record import FAILED, RequestRecord
from frontend.observability.trace_context import RequestTrace, Tracer, trace_id_in
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.protocol import CANCELLED, Error
from lmi_server.serving.models.model import Model
from lmi_server.supervisor.job import Job

_PROMPT_BYTES = 8192  # of a body, in the access log


class RequestReports:
    """Counts requests, and logs and traces them as far as the settings ask for it.

    `tracing` begins the traces of requests. It is None until something sets it. Each of `listeners` gets every record.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics, error_rates: ErrorRates) -> None:
        self._metrics = metrics
        self._error_rates = error_rates
        self._log = RequestLog.from_settings(settings)
        self.tracing: Tracer | None = None
        self._logs_prompts = settings.log_prompts
        self.listeners: list[Callable[[RequestRecord], None]] = []

    def report_answer(
        self,
        code: int,
        arrived: float,
        model: Model,
        job: Job,
        body: bytes,
        scope: Scope,
        trace: RequestTrace | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Report a request that a worker answered. `code` is the status under which it counts.

        `arrived` is that of time.monotonic(); `traceparent` is the client's header.
        """
        ended = time.monotonic()
        reply, request = job.reply, job.request
        terminal = reply.terminal
        record = RequestRecord(
            code,
            arrived,
            ended,
            request.request_id,
            model.label,
            request.route,
            _address(scope),
            job.queued_at,
            job.sent_at or ended,
            reply.first_byte_at or ended,
            None if terminal is None or isinstance(terminal, Error) else terminal.summary,
            _trace_id(trace, traceparent),
            terminal.kind if isinstance(terminal, Error) else "",
            job.attempts,
            body[:_PROMPT_BYTES] if self._logs_prompts else b"",
        )
        self._metrics.for_model(model).count_answer(record)
        if code >= FAILED:
            self._count_failure(code, model, job)
        self._write(record, trace)

    def report_refusal(
        self,
        code: int,
        arrived: float,
        request_id: str,
        model: Model | None,
        route: str,
        scope: Scope,
        trace: RequestTrace | None = None,
        error: str = "",
    ) -> None:
        """Log and trace a request that no worker saw; the relay has counted it. `error` is the kind of an error."""
        if self._log is None and trace is None and not self.listeners:
            return
        label = "" if model is None else model.label
        record = RequestRecord(code, arrived, time.monotonic(), request_id, label, route, _address(scope), error=error)
        record.trace_id = _trace_id(trace, None)
        self._write(record, trace)

    def _write(self, record: RequestRecord, trace: RequestTrace | None) -> None:
        for listener in self.listeners:
            listener(record)
        if self._log is not None:
            self._log.add(record)
        if trace is not None and self.tracing is not None:
            self.tracing.end(trace, record)

    def _count_failure(self, code: int, model: Model, job: Job) -> None:
        error = None
        terminal = job.reply.terminal
        if isinstance(terminal, Error) and terminal.kind != CANCELLED:
            error = terminal.exception()
            self._metrics.count_error(error)
            if not job.sent_at:
                self._metrics.for_model(model).count_overload(error)
        self._error_rates.count(code, error)

    def flush(self) -> None:
        """Write what waits for the log."""
        if self._log is not None:
            self._log.flush()

    async def close(self) -> None:
        """Write and send what waits."""
        self.flush()
        if self.tracing is not None:
            await self.tracing.close()


def _trace_id(trace: RequestTrace | None, traceparent: str | None) -> str:
    if trace is not None:
        return trace.trace_id
    return "" if traceparent is None else trace_id_in(traceparent)


def _address(scope: Scope) -> str:
    """Return the address of the client, "" on a Unix socket."""
    client = scope["client"]
    return client[0] if client else ""
