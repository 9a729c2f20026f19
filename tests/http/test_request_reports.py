"""When a request is counted: once the loop is idle, before the metrics are read, or at once if it failed."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from relay_helpers import on_loop

from frontend.observability import idle_calls
from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import Metrics
from frontend.observability.request_reports import AnsweredRequest, RequestReports
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

    def answered(self, status: int) -> None:
        job = Job(1, Input("invocations", {}, [("data", b"{}")], "id", 0), lambda: None)
        now = time.monotonic()
        self._reports.answered(AnsweredRequest(status, now, now, MODEL, job, b"{}", ("127.0.0.1", 1), None))

    def counted(self) -> int:
        return sum(self.metrics.of(MODEL).by_code.values())


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_calls, "_PASS_S", 0.0)
    monkeypatch.setattr(idle_calls, "_LIMIT_S", 60.0)


@on_loop
async def test_a_scrape_has_every_request_that_has_ended(never_idle: None) -> None:
    reports = Reports()
    reports.answered(200)
    assert reports.counted() == 0
    text = (await reports.metrics.text()).decode()
    assert re.search(r"^Response_2XX_total\{.*\} 1\.0$", text, re.MULTILINE)


@on_loop
async def test_a_failure_is_counted_at_once_with_what_ended_before_it(never_idle: None) -> None:
    reports = Reports()
    reports.answered(200)
    reports.answered(424)
    assert reports.counted() == 2
