"""The counts of one model's requests: plain numbers; each scrape makes families of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from frontend.observability.metrics.catalogue import HISTOGRAMS
from frontend.observability.metrics.lmi_logs import MetricLog
from frontend.observability.metrics.quantile_sketch import QuantileSketch
from frontend.observability.request_record import CLIENT_GONE, FAILED, RequestRecord
from lmi_server.contract.errors import DeadlineError, KeyBusyError, LmiServerError, QueueDelayError, QueueFullError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.protocol import Summary

_REASONS: Mapping[type[LmiServerError], str] = {
    QueueFullError: "queue_full",
    QueueDelayError: "queue_delay",
    DeadlineError: "deadline",
    KeyBusyError: "key_limit",
}
"""Why requests are refused that the server could serve if it had less to do."""

_UNSETTLED = 256  # records that wait for the histograms
_MAX_ADAPTERS = 1000  # with series of their own; each takes memory for as long as the model is registered
_OTHERS = "(others)"


class AdapterCounts:
    """What is counted of the requests for one adapter, or for the model without adapter."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens", "reasons")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.reasons: dict[str, int] = {}

    def add(self, summary: Summary) -> None:
        """Count a request that generated a text."""
        self.prompt_tokens += summary.prompt_tokens
        self.cached_tokens += summary.cached_tokens
        self.output_tokens += summary.output_tokens
        self.add_end(summary.finish_reason)

    def add_end(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class ModelMetrics:
    """What is counted of the requests of one model. `name` is its name without its version, "" for none.

    `histograms` and `adapters` are complete after `settle`. Until then requests wait in a list: to sort many into a
    dozen histograms together costs half as much. With a `log` each request is also written there.
    """

    def __init__(self, name: str, log: MetricLog | None = None) -> None:
        self.name = name
        self.by_code: dict[int, int] = {}
        self.by_reason: dict[str, int] = {}
        self.adapters: dict[str, AdapterCounts] = {}
        self.histograms = {row.key: Histogram(row.bounds) for row in HISTOGRAMS}
        self.first_token_sketch = QuantileSketch()
        self.token_gap_sketch = QuantileSketch()
        self._log = log
        self._unsettled: list[RequestRecord] = []

    def tokens(self, key: str) -> int:
        """Return a sum over all adapters; `key` is its attribute in AdapterCounts."""
        return sum(getattr(counts, key) for counts in self.adapters.values())

    def count_refusal(self, code: int) -> None:
        """Count a request that no worker saw."""
        self.by_code[code] = self.by_code.get(code, 0) + 1
        if self._log is not None:
            self._log.response(code)

    def count_overload(self, error: LmiServerError) -> None:
        """Count why no worker saw a request, if the load is the reason."""
        reason = _REASONS.get(type(error))
        if reason is not None:
            self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def count_answer(self, record: RequestRecord) -> None:
        """Count a request that a worker answered."""
        code = record.code
        self.by_code[code] = self.by_code.get(code, 0) + 1
        self._unsettled.append(record)
        if len(self._unsettled) >= _UNSETTLED:
            self.settle()
        if self._log is not None:
            self._log.request(self.name, record)
            self._log.response(code)

    def settle(self) -> None:
        """Sort what has ended since the last call into the histograms."""
        records, self._unsettled = self._unsettled, []
        self._observe("queue", [record.queue_s for record in records])
        self._observe("first_byte", [record.first_byte_s for record in records])
        self._observe("duration", [record.duration_s for record in records])
        generated = [(record, record.summary) for record in records if record.summary is not None]
        self._settle_generated([summary for _, summary in generated])
        self._settle_first_tokens(generated)
        for record in records:
            if record.summary is None:
                self._count_without_text(record.code)
            if record.trace_id:
                self._mark(record)

    def _observe(self, key: str, values: list[float]) -> None:
        self.histograms[key].observe_all(values)

    def _settle_generated(self, summaries: Sequence[Summary]) -> None:
        self._observe("prompt_tokens", [summary.prompt_tokens for summary in summaries])
        self._observe("output_tokens", [summary.output_tokens for summary in summaries])
        for summary in summaries:
            self._adapter(summary.adapter).add(summary)

    def _settle_first_tokens(self, generated: Sequence[tuple[RequestRecord, Summary]]) -> None:
        timed = [(record, summary, summary.prefill_s) for record, summary in generated if summary.prefill_s is not None]
        first_token = [record.sent - record.arrived + prefill_s for record, _, prefill_s in timed]
        self.first_token_sketch.observe_all(first_token)
        self._observe("first_token", first_token)
        self._observe("prefill", [prefill_s for _, _, prefill_s in timed])
        self._observe("decode", [summary.generate_s - prefill_s for _, summary, prefill_s in timed])
        gaps = [
            (summary.decode_s / count, count)
            for _, summary, _ in timed
            if (count := summary.output_tokens - summary.sequences) > 0
        ]
        for gap, count in gaps:
            self.histograms["token_gap"].observe(gap, count)
            self.token_gap_sketch.observe(gap, count)
        self._observe("time_per_token", [gap for gap, _ in gaps])

    def _count_without_text(self, code: int) -> None:
        """Count the end of a request without a text; if the client did something wrong, it counts by code only."""
        if code == CLIENT_GONE:
            self._adapter("").add_end("cancelled")
        elif code >= FAILED:
            self._adapter("").add_end("error")

    def _mark(self, record: RequestRecord) -> None:
        """Keep the request as an exemplar of the times that an operator follows to a trace."""
        at = record.ended - time.monotonic() + time.time()
        times = {
            "queue": record.queue_s,
            "first_byte": record.first_byte_s,
            "duration": record.duration_s,
            "first_token": record.first_token_s,
        }
        for key, seconds in times.items():
            if seconds is not None:
                self.histograms[key].mark(seconds, record.trace_id, at)

    def _adapter(self, name: str) -> AdapterCounts:
        counts = self.adapters.get(name)
        if counts is None:
            if len(self.adapters) >= _MAX_ADAPTERS:
                name = _OTHERS
            counts = self.adapters.setdefault(name, AdapterCounts())
        return counts
