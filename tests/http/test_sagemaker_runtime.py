"""boto3's client of SageMaker endpoints against this server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from own_code_helpers import make_own
from sagemaker_helpers import sagemaker_runtime
from server_helpers import Server, make_model, request, running

from frontend.sagemaker.runtime import payload_part

KEY = "user-key-0123456789"
OWN = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    properties = inputs.get_properties()
    if "status" in properties:
        return Output(int(properties["status"]), "no").add("the model says no")
    return Output().add_as_json(properties).add_property("x-amzn-sagemaker-custom-attributes", "a=b")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("endpoints")
    with running(make_model(directory / "model"), make_own(directory / "own", OWN), workers=2) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return sagemaker_runtime(server.port, aws_session_token="planted-token")


def body(prompt: str, tokens: int = 3, stream: bool = False) -> bytes:
    return json.dumps(request(prompt, tokens, stream)).encode()


def parts(answer: Any) -> bytes:
    return b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])


def test_an_endpoint_is_a_model_of_its_name(client: Any) -> None:
    answer = client.invoke_endpoint(EndpointName="model", ContentType="application/json", Body=body("a b c"))
    assert json.load(answer["Body"]) == {"generated_text": " a b c"}
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == ("application/json", "AllTraffic")


@pytest.mark.parametrize(
    "named", [{"TargetModel": "own.tar.gz"}, {"TargetModel": "/own"}, {"InferenceComponentName": "own"}]
)
def test_an_endpoint_of_several_models_names_one(client: Any, named: dict[str, str]) -> None:
    sent = {"CustomAttributes": "x=y", "InferenceId": "7", "SessionId": "s", "Accept": "text/plain"}
    answer = client.invoke_endpoint(EndpointName="all", ContentType="text/x", Body=b"x", **named, **sent)
    seen = {name.lower(): value for name, value in json.load(answer["Body"]).items()}
    assert answer["CustomAttributes"] == "a=b"
    assert (seen["x"], seen["content-type"], seen["accept"]) == ("y", "text/x", "text/plain")
    assert (seen["x-amzn-sagemaker-inference-id"], seen["x-amzn-sagemaker-session-id"]) == ("7", "s")
    assert {"authorization", "x-amz-security-token", "x-amz-date"}.isdisjoint(seen), "a container sees no signature"


def test_a_stream_comes_in_events(client: Any) -> None:
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="model", ContentType="application/json", Body=body("a b", 4, stream=True)
    )
    assert answer["ContentType"] == "application/jsonlines"
    events = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    assert [json.loads(event)["token"]["text"] for event in events] == [" a", " b", " a", " b"]
    assert all(event.endswith(b"\n") for event in events)


def test_what_does_not_stream_comes_in_one_event(client: Any) -> None:
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="own", ContentType="text/x", Accept="text/plain", Body=b"x"
    )
    assert json.loads(parts(answer))["accept"] == "text/plain"


@pytest.mark.parametrize("call", ["invoke_endpoint", "invoke_endpoint_with_response_stream"])
@pytest.mark.parametrize("status", [400, 404, 503])
def test_an_error_of_the_model_is_a_model_error(client: Any, call: str, status: int) -> None:
    with pytest.raises(client.exceptions.ModelError) as raised:
        getattr(client, call)(EndpointName="own", Body=b"x", CustomAttributes=f"status={status}")
    answer = raised.value.response
    assert (answer["OriginalStatusCode"], answer["OriginalMessage"]) == (status, "the model says no")
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert f"error ({status}) from primary" in answer["Error"]["Message"]


def test_a_bad_request_tells_what_the_model_has_said(client: Any) -> None:
    with pytest.raises(client.exceptions.ModelError) as raised:
        client.invoke_endpoint(EndpointName="model", Body=b"{")
    assert raised.value.response["OriginalStatusCode"] == 424
    assert "JSON" in raised.value.response["OriginalMessage"]


@pytest.mark.parametrize("named", [{"TargetModel": "none.tar.gz"}, {"InferenceComponentName": "none"}])
def test_a_model_that_is_not_there_is_a_validation_error(client: Any, named: dict[str, str]) -> None:
    with pytest.raises(client.exceptions.ClientError) as raised:
        client.invoke_endpoint(EndpointName="all", Body=b"x", **named)
    assert raised.value.response["Error"]["Code"] == "ValidationError"
    assert "none" in raised.value.response["Error"]["Message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/endpoints/model/invocations"), ("POST", "/endpoints/model/other"), ("POST", "/endpoints/invocations")],
)
def test_other_paths_and_methods_are_not_there(server: Server, method: str, path: str) -> None:
    assert server.http.request(method, path).status_code in (404, 405)


def test_where_keys_are_wanted_a_signature_is_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_model(tmp_path_factory.mktemp("keys") / "model")
    with running(model, variables={"SERVING_API_KEYS": KEY}, workers=1) as server:
        client = sagemaker_runtime(server.port)
        with pytest.raises(client.exceptions.ClientError) as raised:
            client.invoke_endpoint(EndpointName="model", Body=body("a"))
        assert raised.value.response["Error"]["Code"] == "AccessDeniedException"
        client.meta.events.register("before-sign", lambda request, **_: request.headers.add_header("x-api-key", KEY))
        answer = client.invoke_endpoint(EndpointName="model", Body=body("a"))
        assert json.load(answer["Body"]) == {"generated_text": " a a a"}


def test_an_event_of_any_size_is_read_by_the_sdk() -> None:
    from botocore.eventstream import EventStreamBuffer

    buffer = EventStreamBuffer()
    sizes = [1, 255, 65_536, 1_000_000]
    for size in sizes:
        buffer.add_data(payload_part(b"x" * size))
    assert [len(event.payload) for event in buffer] == sizes


def test_the_paths_are_documented(server: Server) -> None:
    paths = httpx.get(f"http://127.0.0.1:{server.port}/openapi.json").json()["paths"]
    assert {"/endpoints/{endpoint}/invocations", "/endpoints/{endpoint}/invocations-response-stream"} <= set(paths)
