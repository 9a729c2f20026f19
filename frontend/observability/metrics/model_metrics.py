"""What is counted of the requests of one model: plain numbers, of which families are made at each scrape."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.observability.metrics.lmi import CLIENT_GONE
from frontend.observability.metrics.metric_log import MetricLog
from frontend.observability.metrics.quantile_sketch import QuantileSketch
from frontend.observability.request_record import FAILED, RequestRecord
from lmi_server.contract.errors import DeadlineError, KeyBusyError, LmiServerError, QueueDelayError, QueueFullError
from lmi_server.contract.histogram import Histogram
from lmi_server.contract.protocol import Summary

# Seconds; from a cached embedding to a long generation.
_DURATIONS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_FIRST_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60)
_QUEUE_TIMES = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

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

    def ended(self, reason: str, count: int) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + count

    def add(self, reason: str, summaries: Sequence[Summary]) -> None:
        """Add requests that ended for the same reason."""
        self.ended(reason, len(summaries))
        self.prompt_tokens += sum([summary.prompt_tokens for summary in summaries])
        self.cached_tokens += sum([summary.cached_tokens for summary in summaries])
        self.output_tokens += sum([summary.output_tokens for summary in summaries])


class ModelMetrics:
    """What is counted of the requests of one model. `name` is its name without its version, "" for none.

    The histograms and `adapters` are complete after `settle`: until then requests wait in a list, which is cheaper than
    to sort each into a dozen of buckets while others wait for their answers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_code: dict[int, int] = {}
        self.by_reason: dict[str, int] = {}
        self.adapters: dict[str, AdapterCounts] = {}
        self.duration = Histogram(_DURATIONS)
        self.first_byte = Histogram(_FIRST_TIMES)
        self.queue = Histogram(_QUEUE_TIMES)
        self.first_token = Histogram(_FIRST_TIMES)
        self.prefill = Histogram(_FIRST_TIMES)
        self.decode = Histogram(_DURATIONS)
        self.token_gap = Histogram(_GAPS)
        self.time_per_token = Histogram(_GAPS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.output_tokens = Histogram(_TOKENS)
        self.first_token_sketch = QuantileSketch()
        self.token_gap_sketch = QuantileSketch()
        self._unsettled: list[RequestRecord] = []

    def refused(self, code: int) -> None:
        """Count a request that no worker saw."""
        self.by_code[code] = self.by_code.get(code, 0) + 1

    def turned_away(self, error: LmiServerError) -> None:
        """Count why no worker saw a request, if the load is the reason."""
        reason = _REASONS.get(type(error))
        if reason is not None:
            self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def answered(self, record: RequestRecord) -> None:
        """Count a request that a worker answered."""
        code = record.code
        self.by_code[code] = self.by_code.get(code, 0) + 1
        self._unsettled.append(record)
        if len(self._unsettled) >= _UNSETTLED:
            self.settle()

    def settle(self) -> None:
        """Sort what has ended since the last call into the histograms."""
        records, self._unsettled = self._unsettled, []
        self.queue.observe_all([record.sent - record.queued for record in records])
        self.first_byte.observe_all([record.first_byte - record.arrived for record in records])
        self.duration.observe_all([record.ended - record.arrived for record in records])
        generated = [record for record in records if record.summary is not None]
        if generated:
            self._settle_generated(generated)
        if len(generated) < len(records):
            self._settle_others([record.code for record in records if record.summary is None])
        for record in [record for record in records if record.trace_id]:
            self._mark(record)

    def _settle_generated(self, records: Sequence[RequestRecord]) -> None:
        summaries: list[Any] = [record.summary for record in records]
        self.prompt_tokens.observe_all([summary.prompt_tokens for summary in summaries])
        self.output_tokens.observe_all([summary.output_tokens for summary in summaries])
        ends: defaultdict[tuple[str, str], list[Summary]] = defaultdict(list)
        for summary in summaries:
            ends[summary.adapter, summary.finish_reason].append(summary)
        for (adapter, reason), alike in ends.items():
            self._adapter(adapter).add(reason, alike)
        timed = [
            (record, summary)
            for record, summary in zip(records, summaries, strict=True)
            if summary.prefill_s is not None
        ]
        first_times = [record.sent - record.arrived + summary.prefill_s for record, summary in timed]
        self.first_token.observe_all(first_times)
        self.first_token_sketch.observe_all(first_times)
        self.prefill.observe_all([summary.prefill_s for _, summary in timed])
        self.decode.observe_all([summary.generate_s - summary.prefill_s for _, summary in timed])
        self._settle_gaps([summary for _, summary in timed if summary.output_tokens > summary.sequences])

    def _settle_gaps(self, summaries: Sequence[Summary]) -> None:
        gaps = [summary.output_tokens - summary.sequences for summary in summaries]
        means = [summary.decode_s / count for summary, count in zip(summaries, gaps, strict=True)]
        for mean, count in zip(means, gaps, strict=True):
            self.token_gap.observe(mean, count)
            self.token_gap_sketch.observe(mean, count)
        self.time_per_token.observe_all(means)

    def _settle_others(self, codes: Sequence[int]) -> None:
        """Count requests that ended without a text; those that the client did wrong count by code only."""
        cancelled, failed = codes.count(CLIENT_GONE), len([code for code in codes if code >= FAILED])
        for reason, count in (("cancelled", cancelled), ("error", failed - cancelled)):
            if count:
                self._adapter("").ended(reason, count)

    def _mark(self, record: RequestRecord) -> None:
        """Keep the request as an exemplar of the times that an operator follows to a trace."""
        trace = (record.trace_id, record.ended - time.monotonic() + time.time())
        self.queue.mark(record.queue_s, *trace)
        self.first_byte.mark(record.first_byte_s, *trace)
        self.duration.mark(record.duration_s, *trace)
        first_token_s = record.first_token_s
        if first_token_s is not None:
            self.first_token.mark(first_token_s, *trace)

    def _adapter(self, name: str) -> AdapterCounts:
        counts = self.adapters.get(name)
        if counts is None:
            if len(self.adapters) >= _MAX_ADAPTERS:
                name = _OTHERS
            counts = self.adapters.setdefault(name, AdapterCounts())
        return counts


class LoggedModelMetrics(ModelMetrics):
    """Counts, and writes the log of metrics."""

    def __init__(self, name: str, log: MetricLog) -> None:
        super().__init__(name)
        self._log = log

    def refused(self, code: int) -> None:
        super().refused(code)
        self._log.response(code)

    def answered(self, record: RequestRecord) -> None:
        super().answered(record)
        self._log.request(self.name, record.queue_s, record.duration_s)
        self._log.response(record.code)
