"""A request is counted when it has ended, before anything reads the metrics."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

from relay_helpers import on_loop

from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import PLAIN, Metrics
from frontend.observability.request_reports import RequestReports
from lmi_server.configuration.server_settings import resolve_server
from lmi_server.contract.protocol import Input
from lmi_server.supervisor.job import Job

MODEL: Any = SimpleNamespace(label="model", name="model", pool=None)


class Reports:
    """Reports of a server that has no models, so that what is counted is in the sums over all models."""

    def __init__(self) -> None:
        settings, _ = resolve_server({}, {})
        self.metrics = Metrics(list)
        self._reports = RequestReports(settings, self.metrics, ErrorRates({}))

    def report_answer(self, status: int) -> None:
        job = Job(1, Input("invocations", {}, [("data", b"{}")], "id", 0), lambda: None)
        scope = {"client": ("127.0.0.1", 1)}
        self._reports.report_answer(status, time.monotonic(), MODEL, job, b"{}", scope)

    def count(self) -> int:
        return sum(self.metrics.for_model(MODEL).by_code.values())


@on_loop
async def test_a_scrape_has_every_request_that_has_ended() -> None:
    reports = Reports()
    reports.report_answer(200)
    text, _ = await reports.metrics.exposition(PLAIN)
    assert re.search(rb"^Response_2XX_total\{.*\} 1\.0$", text, re.MULTILINE)


@on_loop
async def test_a_failure_is_counted_at_once_with_what_ended_before_it() -> None:
    reports = Reports()
    reports.report_answer(200)
    reports.report_answer(424)
    assert reports.count() == 2
