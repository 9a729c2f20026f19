"""`sigv4_keys`: boto3's clients are refused as by Amazon if their signature is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sagemaker_helpers import ACCESS_KEY, SECRET_KEY, sagemaker_runtime
from server_helpers import Server, request, serving

from frontend.sagemaker.request_signatures import SignatureCheck
from lmi_server.contract.errors import ConfigurationError

KEYS = f"AKIAOTHER:other-secret, {ACCESS_KEY}:{SECRET_KEY}"
REGION = "eu-west-1"
BODY = json.dumps(request("a b")).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    variables = {"SERVING_SIGV4_KEYS": KEYS, "SERVING_SIGV4_REGION": REGION, "SERVING_MAX_REQUEST_SIZE": "10000"}
    with serving(tmp_path_factory.mktemp("signed"), variables=variables) as server:
        yield server


def client(server: Server, **more: Any) -> Any:
    return sagemaker_runtime(server.port, **{"region_name": REGION} | more)


def refusal(client: Any, **more: Any) -> tuple[int, str, str]:
    with pytest.raises(client.exceptions.ClientError) as raised:
        client.invoke_endpoint(**{"EndpointName": "model", "Body": BODY} | more)
    answer = raised.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"], answer["Error"]["Message"]


def changed(client: Any, change: Callable[[Any], object], event: str = "before-send") -> Any:
    """Have `change` change each request of a client, by default after it is signed."""
    client.meta.events.register(event, lambda request, **_: change(request) and None)
    return client


@pytest.mark.parametrize("more", [{}, {"aws_session_token": "planted-token"}])
@pytest.mark.parametrize("name", ["model", "model:1", "a b~c", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_what_boto3_signs_is_taken(server: Server, name: str, more: dict[str, str]) -> None:
    answer = client(server, **more).invoke_endpoint(
        EndpointName=name, Body=BODY, CustomAttributes="a = b,  c", InferenceId="7", TargetVariant="v"
    )
    assert json.load(answer["Body"]) == {"generated_text": " a b a"}


def test_a_stream_is_taken_too(server: Server) -> None:
    answer = client(server).invoke_endpoint_with_response_stream(EndpointName="model", Body=BODY)
    assert json.loads(b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]))["generated_text"] == " a b a"


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({"aws_secret_access_key": "other-secret"}, "InvalidSignatureException", "secret key"),
        ({"aws_access_key_id": "AKIANOBODY"}, "UnrecognizedClientException", "access key"),
        ({"region_name": "us-east-1"}, "InvalidSignatureException", "sigv4_region"),
    ],
)
def test_wrong_keys_and_regions_are_refused(server: Server, more: dict[str, str], kind: str, told: str) -> None:
    status, code, message = refusal(client(server, **more))
    assert (status, code, told in message) == (403, kind, True), message


def test_a_request_without_a_signature_is_refused(server: Server) -> None:
    for headers in ({}, {"authorization": "Bearer x"}):
        answer = server.http.post("/endpoints/model/invocations", content=BODY, headers=headers)
        expected = (403, "MissingAuthenticationTokenException")
        assert (answer.status_code, answer.headers["x-amzn-errortype"]) == expected
        assert "SigV4" in answer.json()["Message"]
    assert server.http.post("/invocations", content=BODY).status_code == 200, "other paths have no signatures"


def set_header(name: str, value: str) -> Callable[[Any], object]:
    return lambda request: request.headers.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda request: setattr(request, "body", request.body[:-1] + b" "), "InvalidSignatureException", "request"),
        (set_header("X-Amzn-SageMaker-Target-Variant", "v"), "InvalidSignatureException", "target-variant"),
        (set_header("X-Amz-Date", "20200101T000000Z"), "InvalidSignatureException", "dates"),
        (set_header("X-Amz-Date", "today"), "IncompleteSignatureException", "x-amz-date"),
        (set_header("Authorization", "AWS4-HMAC-SHA256 Credential=x"), "IncompleteSignatureException", "form"),
    ],
    ids=["body", "header", "date", "no date", "no signature"],
)
def test_what_changes_after_it_is_signed_is_refused(
    server: Server, change: Callable[[Any], object], kind: str, told: str
) -> None:
    status, code, message = refusal(changed(client(server), change))
    assert (status, code, told in message) == (403, kind, True), message


@pytest.mark.parametrize("stated", ["UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "0" * 64])
def test_a_body_must_be_signed_as_a_whole(server: Server, stated: str) -> None:
    sent = changed(client(server), set_header("X-Amz-Content-SHA256", stated), "before-sign")
    status, code, message = refusal(sent)
    assert (status, code, "SHA-256 of the body" in message) == (403, "InvalidSignatureException", True), message


@pytest.mark.parametrize("minutes", [-6, 6])
def test_a_signature_is_for_five_minutes(server: Server, minutes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore import auth

    now = auth.get_current_datetime

    def later(*given: Any, **named: Any) -> datetime:
        moved: datetime = now(*given, **named) + timedelta(minutes=minutes)
        return moved

    monkeypatch.setattr(auth, "get_current_datetime", later)
    status, code, message = refusal(client(server))
    assert (status, code, "300 seconds" in message) == (403, "InvalidSignatureException", True), message


def test_a_body_that_is_too_long_is_refused(server: Server) -> None:
    status, code, message = refusal(client(server), Body=b"x" * 10_001)
    assert (status, code, "max_request_size=10000" in message) == (400, "ValidationError", True)


@pytest.mark.parametrize("keys", ["", "key", "key:", ":secret", "a:b,,c:d"])
def test_keys_have_a_form(keys: str) -> None:
    with pytest.raises(ConfigurationError, match="ACCESS_KEY_ID:SECRET_KEY"):
        SignatureCheck(keys, REGION, 1)
