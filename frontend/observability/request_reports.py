"""What is told of each request once it has ended: metrics, and, as far as settings ask for them, access log and traces.

The relay only leaves a request here. Requests end in groups, and whatever is done between two answers of a group delays
the rest of it, and lets clients that would have found their next answer at once fall asleep. What is done before the
loop reads the next requests delays those. So requests are reported when the loop is idle: while a worker has all that
there is to do, this costs no time.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from frontend.http.clients import Scope
from frontend.observability.error_rates import ErrorRates
from frontend.observability.idle_calls import call_when_idle
from frontend.observability.metrics.collector import Metrics
from frontend.observability.metrics.model_metrics import ModelMetrics
from frontend.observability.request_log import RequestLog
from frontend.observability.request_record import FAILED, RequestRecord
from frontend.observability.trace_context import RequestTrace, Tracer, trace_id_of
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.protocol import CANCELLED, Error
from lmi_server.serving.models import Model
from lmi_server.supervisor.job import Job

_PROMPT_BYTES = 8192  # of a body, in the access log


class AnsweredRequest(msgspec.Struct, gc=False):
    """A request that a worker answered, as the relay leaves it.

    `status` is that under which it counts. `arrived` and `ended` are those of time.monotonic(). `client` is the address
    and port, None on a Unix socket; `traceparent` is the client's header.
    """

    status: int
    arrived: float
    ended: float
    model: Model
    job: Job
    body: bytes
    client: tuple[str, int] | None
    trace: RequestTrace | None
    traceparent: str | None = None


class RequestReports:
    """Counts requests, and logs and traces them as far as the settings ask for it.

    `tracing` begins the traces of requests. It is None until something sets it.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics, error_rates: ErrorRates) -> None:
        self._metrics = metrics
        self._error_rates = error_rates
        self._log = RequestLog.of(settings)
        self.tracing: Tracer | None = None
        self._logs_prompts = settings.log_prompts
        self._answered: list[AnsweredRequest] = []  # and not reported yet
        self._waits = False  # for an idle loop
        metrics.before_reading = self._report_answered

    def answered(self, request: AnsweredRequest) -> None:
        """Report a request that a worker answered, soon; at once if it failed, because /ping may depend on that."""
        self._answered.append(request)
        if request.status >= FAILED:
            self._report_answered()
        elif not self._waits:
            self._waits = True
            call_when_idle(self._report_when_idle)

    def refused(
        self,
        code: int,
        arrived: float,
        request_id: str,
        model: Model | None,
        route: str,
        scope: Scope,
        trace: RequestTrace | None = None,
        kind: str = "",
    ) -> None:
        """Log and trace a request that no worker saw, which the relay has counted; `kind` is that of an error."""
        log = self._log
        if log is None and trace is None:
            return
        self._report_answered()  # lines stand in the order in which requests ended
        trace_id = "" if trace is None else trace.trace_id
        record = RequestRecord(code, arrived, 0.0, 0.0, 0.0, time.monotonic(), None, trace_id)
        shown = request_id, "" if model is None else model.label, route, _address(scope), kind
        if log is not None:
            log.lines().add(record, *shown)
            log.added()
        if trace is not None:
            self._trace(trace, record, *shown)

    def _report_when_idle(self) -> None:
        self._waits = False
        self._report_answered()

    def _report_answered(self) -> None:
        """Report all in one loop: what a record is made of is then in the processor's cache when its line is made."""
        answered, self._answered = self._answered, []
        log = self._log
        lines = log.lines() if log is not None and answered else None
        logs_prompts = self._logs_prompts
        last: Model | None = None
        for request in answered:
            model = request.model
            if model is not last:
                counts, label, last = self._metrics.of(model), model.label, model
            record = _record(request)
            counts.answered(record)
            trace = request.trace
            if lines is not None or trace is not None:
                received, client = request.job.request, request.client
                address = client[0] if client else ""
                error = "" if record.summary is not None else _error(request.job)
                if lines is not None:
                    prompt = request.body[:_PROMPT_BYTES] if logs_prompts else None
                    lines.add(record, received.request_id, label, received.route, address, error, prompt)
                if trace is not None:
                    shown = received.request_id, label, received.route, address, error
                    self._trace(trace, record, *shown, request.job.attempts)
            if request.status >= FAILED:
                self._count_failure(counts, request)
        if log is not None and lines is not None:
            log.added()

    def _count_failure(self, counts: ModelMetrics, request: AnsweredRequest) -> None:
        error = None
        terminal = request.job.reply.terminal
        if isinstance(terminal, Error) and terminal.kind != CANCELLED:
            error = terminal.exception()
            self._metrics.failed(error)
            if not request.job.sent_at:
                counts.turned_away(error)
        self._error_rates.count(request.status, error)

    def _trace(self, trace: RequestTrace, record: RequestRecord, *shown: Any) -> None:
        """Send the spans of a request, soon; `shown` are the fields that EndedRequest adds to those of a record."""
        assert self.tracing is not None, "a request has a span only if there are traces"
        self.tracing.add(trace, record, shown)

    def flush(self) -> None:
        """Report what has ended; write what waits for the log, and make the spans that wait."""
        self._report_answered()
        if self._log is not None:
            self._log.flush()
        if self.tracing is not None:
            self.tracing.hand_over()

    async def close(self) -> None:
        """Write and send what waits."""
        self.flush()
        if self.tracing is not None:
            await self.tracing.close()


def _record(request: AnsweredRequest) -> RequestRecord:
    job, ended, trace = request.job, request.ended, request.trace
    reply = job.reply
    terminal = reply.terminal
    if trace is not None:
        trace_id = trace.trace_id
    else:
        trace_id = "" if request.traceparent is None else trace_id_of(request.traceparent)
    return RequestRecord(
        request.status,
        request.arrived,
        job.queued_at,
        job.sent_at or ended,
        reply.first_byte_at or ended,
        ended,
        None if terminal is None or isinstance(terminal, Error) else terminal.summary,
        trace_id,
    )


def _error(job: Job) -> str:
    """Return the kind of the error that ended a job, "" if none did."""
    terminal = job.reply.terminal
    return terminal.kind if isinstance(terminal, Error) else ""


def _address(scope: Scope) -> str:
    """Return the address of the client, "" on a Unix socket."""
    client = scope["client"]
    return client[0] if client else ""
