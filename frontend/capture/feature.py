"""Captures requests and answers if `capture_to` is set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from random import random

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from frontend.capture.destinations import destination
from frontend.capture.exchange import Budget, CapturedExchange
from frontend.capture.settings import CaptureSettings
from frontend.capture.writer import CaptureWriter
from frontend.features import ServerFeature, ServerParts
from frontend.http.clients import Inference, Receive, Scope, Send, Target

_UNAUTHORIZED = (0, 401, 403)  # what no client with access has asked, and what got no answer
_CLOSE_S = 10.0


def attach(server: ServerParts) -> ServerFeature | None:
    """Return the feature; None if nothing is to be captured. Raises ConfigurationError."""
    settings = server.settings.part(CaptureSettings)
    if settings.capture_to is None:
        return None
    capture = Capture(settings)
    server.metrics.sources.append(capture.families)
    return capture


class Capture(ServerFeature):
    """Takes down a share of the requests with their answers."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._share = settings.capture_percentage / 100
        self._limit = settings.capture_max_bytes
        self._budget = Budget(settings.capture_memory)
        names = (name.strip() for name in (settings.capture_redact or "").split(","))
        self._writer = CaptureWriter(destination(settings), frozenset(filter(None, names)))

    def wrap(self, infer: Inference) -> Inference:
        async def capture(target: Target, scope: Scope, receive: Receive, send: Send) -> None:
            exchange = CapturedExchange(target[0], scope, self._limit, self._budget)
            try:
                await infer(target, scope, exchange.receiving(receive), exchange.sending(send))
            finally:
                exchange.ended = time.monotonic()
                if exchange.status in _UNAUTHORIZED:
                    exchange.release()
                else:
                    self._writer.add(exchange)

        def call(target: Target, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            return (capture if random() < self._share else infer)(target, scope, receive, send)

        return call

    async def finish(self) -> None:
        await asyncio.to_thread(self._writer.close, _CLOSE_S)

    def families(self) -> Iterator[Family]:
        """Yield how many exchanges were captured or lost, how many writes failed, and what memory is held."""
        about = "Requests by what became of their capture."
        captured = CounterMetricFamily("lmi_captured_requests", about, None, ["outcome"])
        captured.add_metric(["written"], self._writer.written)
        captured.add_metric(["dropped"], self._writer.dropped)
        captured.add_metric(["failed"], self._writer.failed)
        yield captured
        about = "Writes of captured requests that the directory or S3 did not take."
        yield CounterMetricFamily("lmi_capture_failures", about, self._writer.failures)
        about = "Bytes of captured requests that are held in memory."
        yield GaugeMetricFamily("lmi_capture_held_bytes", about, self._budget.taken)
