"""How far a worker is that joins a model which serves already."""

from __future__ import annotations

import logging

import pytest

from lmi_server.contract.progress import Progress
from lmi_server.serving.pool.load_reports import WorkerLoads
from lmi_server.serving.roster import WorkerRoster


class FakeWorker:
    is_local = True

    def __init__(self, started_at: float, loading: Progress | None = None, is_loading: bool = True) -> None:
        self.started_at, self.loading, self.is_loading = started_at, loading, is_loading


def roster(*workers: FakeWorker) -> WorkerRoster:
    made = WorkerRoster()
    made.numbers = {worker: number for number, worker in enumerate(workers)}  # type: ignore[misc]
    return made


def test_it_is_that_of_the_worker_that_says_so() -> None:
    ready, silent = FakeWorker(1.0, is_loading=False), FakeWorker(2.0)
    assert WorkerLoads("m", roster(ready)).current is None
    found = WorkerLoads("m", roster(ready, silent)).current
    assert found == (Progress("starting a worker"), 2.0)
    weights = Progress("loading weights", 3, 4, unit="tensors")
    assert WorkerLoads("m", roster(ready, silent, FakeWorker(5.0, weights))).current == (weights, 5.0)


def test_connections_to_replicas_elsewhere_are_no_loads() -> None:
    elsewhere = FakeWorker(2.0)
    elsewhere.is_local = False
    assert WorkerLoads("m", roster(elsewhere)).current is None


def test_each_load_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    worker = FakeWorker(1.0, Progress("loading weights", 1, 4, unit="tensors"))
    workers = roster(worker)
    reports = WorkerLoads("m", workers, lambda: now)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        reports.check()
        now += 6
        reports.check()
        worker.loading = Progress("loading weights", 4, 4, unit="tensors")
        reports.check()
        worker.is_loading, worker.loading = False, Progress("loading weights", 1, 4, unit="tensors")
        reports.check()
        worker.is_loading = True
    lines = [record.message for record in caplog.records]
    assert lines == 2 * ["[m] loading weights: 1 of 4 tensors (25 %)", "[m] loading weights: 4 of 4 tensors (100 %)"]
