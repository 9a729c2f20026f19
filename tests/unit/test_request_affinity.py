"""A request goes by its session, its adapter and its beginning; a guess that is wrong costs no more than time."""

from __future__ import annotations

import json
import random

import pytest

from lmi_server.contract.protocol import ADAPTER_HEADER, Input
from lmi_server.serving.dispatch.request_affinity import RequestAffinity

IDLE = {"a": 0, "b": 0}
LONG = "word " * 400


def asking(prompt: str, model: str = "base", last: bool = False, **properties: str) -> Input:
    fields = {"model": model, "prompt": prompt}
    body = json.dumps(dict(reversed(fields.items())) if last else fields).encode()
    return Input("completions", properties, [("data", body)])


def send(affinity: RequestAffinity[str], request: Input, held: dict[str, int] | None = None) -> str:
    worker = affinity.choose(request, IDLE if held is None else held)
    assert worker is not None
    affinity.record(request, worker)
    return worker


@pytest.mark.parametrize("last", [False, True])
def test_requests_for_an_adapter_follow_each_other(last: bool) -> None:
    affinity = RequestAffinity[str](False, True, 4, {"french"})
    first = send(affinity, asking("one", "french", last))
    assert {send(affinity, asking(f"{number} times", "french", last)) for number in range(9)} == {first}
    assert send(affinity, asking(LONG, "french", last), {first: 8, "c": 0}) == "c"


def test_the_header_names_the_adapter_before_the_body() -> None:
    affinity = RequestAffinity[str](False, True, 4, {"french"})
    first = send(affinity, asking("one", "french"))
    other = "ab".replace(first, "")
    affinity.record(asking("one", **{ADAPTER_HEADER: "dutch"}), other)
    assert send(affinity, asking("two", "french", **{ADAPTER_HEADER: "dutch"})) == other


def test_the_name_of_the_model_itself_draws_no_requests_together() -> None:
    affinity = RequestAffinity[str](False, True, 4, {"french"})
    affinity.record(asking("one"), "a")
    assert affinity.choose(asking("two"), {"a": 1, "b": 0}) == "b"


def test_four_prefixes_over_two_workers_stay_where_they_are() -> None:
    affinity = RequestAffinity[str](False, True)
    prefixes = [f"{number} {LONG}" for number in range(4)]
    homes = [send(affinity, asking(f"{prefix} first")) for prefix in prefixes]
    assert sorted(homes) == ["a", "a", "b", "b"]
    chance = random.Random(1)
    for turn in range(100):
        number = chance.randrange(4)
        assert send(affinity, asking(f"{prefixes[number]} turn {turn}")) == homes[number]


def test_a_session_is_named_by_either_header() -> None:
    affinity = RequestAffinity[str](True, False)
    affinity.record(asking("x", **{"x-session-id": "1"}), "b")
    assert affinity.worker_of_session(asking("y", **{"x-amzn-sagemaker-session-id": "1"})) == "b"
    assert affinity.worker_of_session(asking("y")) is None
    affinity.record(asking("x", **{"x-session-id": ""}), "b")
    assert affinity.worker_of_session(asking("y", **{"x-session-id": ""})) is None, "an empty name is none"
    affinity.forget("b")
    assert affinity.worker_of_session(asking("y", **{"x-session-id": "1"})) is None


@pytest.mark.parametrize("body", [b"", b'{"model": "', b'"model":"\xff"', b'{"model": 1}' * 5000, b"\x00" * 70_000])
def test_any_body_goes_somewhere(body: bytes) -> None:
    affinity = RequestAffinity[str](True, True, 1, {"french"})
    request = Input("completions", {}, [("data", body)])
    assert send(affinity, request) in IDLE
    assert affinity.choose(request, {}) is None


def test_without_prefixes_the_load_alone_decides() -> None:
    affinity = RequestAffinity[str](True, False)
    assert affinity.choose(asking("x"), {"a": 2, "b": 1}) == "b"
    assert affinity.choose(asking("x"), {}) is None
