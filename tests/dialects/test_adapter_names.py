"""Which adapter a request asks for, in every dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dialect_helpers import DELTAS, SERVED, answer, request
from growth import assert_linear

from lmi_server.contract.errors import ModelNotFoundError, RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import parse
from lmi_server.dialects.adapters import naming_adapter, requested_adapter

ADAPTED = msgspec.structs.replace(SERVED, adapters=frozenset({"french", "german"}))
BODIES: dict[str, dict[str, Any]] = {
    "invocations": {"inputs": "a"},
    "completions": {"prompt": ["a", "b"]},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def adapters(received: Input) -> set[str | None]:
    return {generation.adapter for generation in parse(received, ADAPTED).requests}


def in_query(received: Input, **query: str) -> Input:
    entries = [(key, value.encode()) for key, value in query.items()]
    return msgspec.structs.replace(received, content=[*entries, *received.content])


@pytest.mark.parametrize("route", BODIES)
def test_each_place_that_may_name_an_adapter(route: str) -> None:
    body = BODIES[route]
    assert adapters(request(route, body)) == {None}
    assert adapters(request(route, body, adapter="french")) == {"french"}
    assert adapters(request(route, {**body, "adapters": "french"})) == {"french"}
    assert adapters(request(route, {**body, "adapters": ["french"]})) == {"french"}
    assert adapters(request(route, {**body, "adapter": "french"})) == {"french"}
    assert adapters(in_query(request(route, body), adapter="french")) == {"french"}
    assert adapters(request(route, body, x_amzn_sagemaker_adapter_identifier="french")) == {"french"}
    assert adapters(request(route, {**body, "adapters": ""})) == {None}


@pytest.mark.parametrize("route", BODIES)
def test_header_goes_before_query_before_body_before_attribute(route: str) -> None:
    received = request(route, {**BODIES[route], "adapters": "french"}, adapter="german")
    assert adapters(received) == {"french"}
    assert adapters(in_query(received, adapter="german")) == {"german"}
    headed = request(route, {**BODIES[route], "adapters": "german"}, x_amzn_sagemaker_adapter_identifier="french")
    assert adapters(in_query(headed, adapter="german")) == {"french"}


def test_a_parameter_of_text_generation_inference_names_one() -> None:
    assert adapters(request("invocations", {"inputs": "a", "parameters": {"adapter_id": "german"}})) == {"german"}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_openais_model_names_one(route: str) -> None:
    body = {**BODIES[route], "model": "french"}
    assert adapters(request(route, body)) == {"french"}
    assert adapters(request(route, {**body, "adapters": "german"})) == {"german"}
    exchange = parse(request(route, body), ADAPTED)
    assert b'"model":"french"' in answer(exchange, *[DELTAS for _ in exchange.requests])
    with pytest.raises(ModelNotFoundError, match="served here: tiny, model, french, german"):
        parse(request(route, {**body, "model": "spanish"}), ADAPTED)


@pytest.mark.parametrize("route", BODIES)
def test_one_that_is_not_registered_is_refused(route: str) -> None:
    with pytest.raises(RequestError, match="The adapter spanish has not been registered; registered: french, german"):
        adapters(request(route, BODIES[route], adapter="spanish"))
    aliased = request(
        route, BODIES[route], x_amzn_sagemaker_adapter_identifier="x1", x_amzn_sagemaker_adapter_alias="Spanish"
    )
    with pytest.raises(RequestError, match="The adapter Spanish has not been registered"):
        parse(aliased, SERVED)


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("invocations", {"inputs": "a", "parameters": {"adapter_id": "french"}}, "french"),
        ("invocations", {"inputs": "a", "model": "french"}, None),
        ("invocations", {"prompt": "a", "model": "french"}, "french"),
        ("invocations", {"prompt": "a", "parameters": {"adapter_id": "french"}}, None),
        ("invocations", {"messages": [{"role": "user", "content": "a"}], "inputs": "a", "model": "french"}, "french"),
        ("completions", {"prompt": "a", "inputs": "a", "model": "french"}, "french"),
        ("invocations", {"inputs": "a", "adapter": "german", "adapters": ["french"]}, "french"),
        ("invocations", {"inputs": "a", "adapters": "", "parameters": {"adapter_id": "french"}}, None),
    ],
)
def test_the_answer_before_parsing_is_that_of_the_dialect(route: str, body: dict[str, Any], expected: str) -> None:
    received = request(route, body)
    assert (requested_adapter(received, body, ADAPTED), adapters(received)) == (expected, {expected})


def test_a_body_that_only_own_code_can_read_may_name_one_in_every_way() -> None:
    for body in ({"parameters": {"adapter_id": "french"}}, {"model": "french"}, {"adapters": ["french"]}):
        assert requested_adapter(request("invocations", body), body, ADAPTED) == "french"


@pytest.mark.parametrize("part", ["[],", "{},", "1,", '"",'])
def test_what_names_no_adapter_is_read_past(part: str) -> None:
    def name(text: str) -> None:
        for field in ("a", "inputs", "parameters", "adapters"):
            naming_adapter(Input("invocations", {}, [("data", f'{{"{field}": [{text}0]}}'.encode())]), ["model"])

    assert_linear(name, part)
    body = f'{{"messages": [{part * 100_000}0], "adapters": ["a"]}}'.encode()
    named = naming_adapter(Input("invocations", {}, [("data", body)]), ["model"])
    assert named.properties["x-amzn-sagemaker-adapter-identifier"] == "a"
