"""The requests that the console keeps: how many, how much of each, and what it says of one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from frontend.console.requests import KEPT, PAGE, RecentRequests
from frontend.observability.request_record import RequestRecord
from lmi_server.contract.protocol import Summary

SUMMARY = Summary("length", 5, 11, 2, 1, 0.25, 0.75, 0.5)


def record(arrived: float = 100.0, **more: Any) -> RequestRecord:
    """Return a request that waited 0.5 s, of which the first token took 0.25 s more and the others half a second."""
    times = {"queued": arrived + 0.125, "sent": arrived + 0.625, "first_byte": arrived + 0.9}
    given = {"code": 200, "ended": arrived + 1.5, "id": "a", "model": "m", "route": "invocations", "client": "::1",
             "summary": SUMMARY, **times, **more}  # fmt: skip
    return RequestRecord(arrived=arrived, **given)


def test_the_stages_are_the_whole_of_a_request() -> None:
    recent = RecentRequests()
    recent.add(record())
    found = recent.details(1)
    assert found is not None
    assert found["stages"] == [
        ("reading", 0, 125), ("queue", 125, 500), ("prefill", 625, 250), ("decode", 875, 500), ("sending", 1375, 125),
    ]  # fmt: skip
    assert (found["ttft"], found["token_gap"], found["cached_tokens"]) == (875, 50, 2)
    assert found["prompt"] is None


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"sent": 0.0, "queued": 0.0, "summary": None, "code": 503}, ["reading"]),
        ({"summary": None}, ["reading", "queue", "model", "sending"]),
        ({"summary": Summary("stop", 1, 1, 0, 1, None, 0.5, 0.0)}, ["reading", "queue", "generation", "sending"]),
    ],
)
def test_a_request_has_the_stages_that_it_reached(more: dict[str, Any], names: list[str]) -> None:
    recent = RecentRequests()
    recent.add(record(**more))
    found = recent.details(1)
    assert found is not None
    assert [name for name, _, _ in found["stages"]] == names


def test_stages_never_overlap_whatever_a_worker_says() -> None:
    choose = random.Random(7)
    recent = RecentRequests()
    for number in range(1, 500):
        odd = [choose.choice((-1e9, -1.0, 0.0, 0.1, 1e12)) for _ in range(6)]
        summary = Summary("x", 1, 0, 0, 3, choose.choice((None, odd[0])), odd[1], odd[2])
        recent.add(record(summary=summary, queued=odd[3], sent=odd[4], first_byte=odd[5]))
        found = recent.details(number)
        assert found is not None
        reached = 0.0
        for _, began, length in found["stages"]:
            assert length >= 0
            assert began == pytest.approx(reached, abs=0.01)
            reached = began + length
        assert reached <= found["duration"] + 0.01


def test_it_keeps_the_last_thousand() -> None:
    recent = RecentRequests()
    for number in range(KEPT + 500):
        recent.add(record(id=f"id-{number}", code=500 if number % 100 == 0 else 200, model=f"m{number % 2}"))
    assert recent.details(500) is None
    assert recent.details(KEPT + 501) is None
    oldest, newest = recent.details(501), recent.details(KEPT + 500)
    assert oldest is not None
    assert newest is not None
    assert (oldest["id"], newest["id"]) == ("id-500", f"id-{KEPT + 499}")
    page = recent.page("", "", False, 0)
    assert (page["kept"], page["ended"], page["matching"], len(page["rows"])) == (KEPT, KEPT + 500, KEPT, PAGE)
    assert [row["number"] for row in page["rows"]] == list(range(KEPT + 500, KEPT + 450, -1))
    assert recent.page("", "", False, 10**9)["page"] == KEPT // PAGE - 1
    assert recent.page("m1", "", False, 0)["matching"] == KEPT // 2
    assert recent.page("", "", True, 0)["matching"] == 10
    assert [row["id"] for row in recent.page("", "id-1499", False, 0)["rows"]] == ["id-1499"]
    assert recent.page("none", "", False, 3)["rows"] == []


def test_what_it_holds_of_a_request_is_bounded() -> None:
    recent = RecentRequests()
    long = "x" * 100_000
    for number, more in enumerate(({"id": long, "error": long, "prompt": b"y" * 8192}, {"client": long}), start=1):
        recent.add(record(**more))
        found = recent.details(number)
        assert found is not None
        assert len(str(found)) < 4000
    recent.add(record(summary=Summary(long, 1, 1, 0, 1, None, 0.5, 0.0, long)))
    kept = recent._records[-1].summary
    assert kept is not None
    assert len(kept.finish_reason) + len(kept.adapter) < 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(make_model(tmp_path_factory.mktemp("requests") / "model"), workers=1) as server:
        yield server


def test_a_request_is_found_by_its_id_and_its_text_is_not_there(server: Server) -> None:
    asked = request("a secret b", 3)
    server.http.post("/invocations", json=asked, headers={"x-request-id": "<i>one"})
    server.http.post("/invocations", json=asked, headers={"x-amzn-sagemaker-target-model": "none"})
    wait_until(lambda: server.http.get("/console/requests").json()["kept"] >= 1, "it is there")
    (row,) = server.http.get("/console/requests", params={"id": "<i>one"}).json()["rows"]
    assert (row["model"], row["code"], row["output_tokens"]) == ("model", 200, 3)
    answer = server.http.get(f"/console/requests/{row['number']}")
    assert "secret" not in answer.text
    assert [name for name, _, _ in answer.json()["stages"]] == ["reading", "queue", "prefill", "decode", "sending"]


@pytest.mark.parametrize("number", ["0", "99999", "-1", "x", "9" * 5000, "1.5", "%00"])
def test_what_is_no_request_is_not_found(server: Server, number: str) -> None:
    assert server.http.get(f"/console/requests/{number}").status_code == 404


def test_pages_are_for_the_clients_of_the_console(server: Server) -> None:
    for path in ("/console/requests", "/console/requests/1"):
        assert server.http.get(path, headers={"x-forwarded-for": "203.0.113.7"}).status_code == 403
    assert server.http.get("/console/requests", params={"page": "x"}).status_code == 400


def test_the_text_is_there_if_the_log_has_it(tmp_path: Path) -> None:
    variables = {"SERVING_LOG_PROMPTS": "true", "SERVING_ACCESS_LOG": "json"}
    with running(make_model(tmp_path / "model"), variables=variables, workers=1) as server:
        server.http.post("/invocations", json=request("a visible b", 3))
        wait_until(lambda: server.http.get("/console/requests").json()["kept"] >= 1, "it is there")
        assert "a visible b" in server.http.get("/console/requests/1").json()["prompt"]
