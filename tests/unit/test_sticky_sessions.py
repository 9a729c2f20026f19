"""Which worker the requests of a session go to, and what is remembered for that."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lmi_server.contract.protocol import Input
from lmi_server.serving.dispatch import sticky_sessions
from lmi_server.serving.dispatch.sticky_sessions import StickySessions
from lmi_server.supervisor.worker_process import WorkerProcess

HEADER = "x-amzn-sagemaker-session-id"
WORKER = cast(WorkerProcess, object())


def asking(session: str) -> Input:
    return Input("invocations", {HEADER: session}, [], "1", 3)


def test_a_session_keeps_the_worker_that_opened_it() -> None:
    sessions = StickySessions()
    sessions.read_answer([("X-Amzn-SageMaker-Session-Id", "a; Expires=never")], WORKER)
    assert sessions.worker_of(asking("a")) is WORKER
    sessions.read_answer([("X-Amzn-SageMaker-Closed-Session-Id", "a")], WORKER)
    assert sessions.worker_of(asking("a")) is None


@pytest.mark.parametrize(("length", "worker"), [(256, WORKER), (257, None), (60_000, None)])
def test_an_id_has_a_length(length: int, worker: Any) -> None:
    sessions = StickySessions()
    sessions.record(asking("a" * length), WORKER)
    assert sessions.worker_of(asking("a" * length)) is worker


def test_the_session_without_a_request_for_longest_is_forgotten() -> None:
    sessions = StickySessions()
    for number in range(sticky_sessions.MAX_SESSIONS + 1):
        sessions.record(asking(str(number)), WORKER)
    assert [sessions.worker_of(asking(session)) for session in ("0", "1")] == [None, WORKER]
