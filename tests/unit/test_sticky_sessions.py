"""The requests of a session go to one worker; what clients call their sessions takes bounded memory."""

from __future__ import annotations

from typing import Any

from lmi_server.contract.protocol import Input
from lmi_server.serving.sticky_sessions import StickySessions


def request(session: str) -> Input:
    return Input("invocations", {"x-amzn-sagemaker-session-id": session}, [("data", b"")])


def test_a_session_stays_with_its_worker_until_it_is_closed() -> None:
    sessions, worker = StickySessions(), object()
    given: Any = worker
    sessions.answered([("X-Amzn-SageMaker-Session-Id", "one; Expires=x")], given)
    assert sessions.worker_of(request("one")) is worker
    sessions.answered([("X-Amzn-SageMaker-Closed-Session-Id", "one")], given)
    assert sessions.worker_of(request("one")) is None


def test_an_id_that_is_longer_than_those_of_sagemaker_is_not_kept() -> None:
    sessions, worker = StickySessions(), object()
    given: Any = worker
    for length in (256, 257):
        sessions.sent(request("x" * length), given)
    assert sessions.worker_of(request("x" * 256)) is worker
    assert sessions.worker_of(request("x" * 257)) is None
