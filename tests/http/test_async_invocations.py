"""InvokeEndpointAsync by boto3, with inputs and outputs on moto's S3."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from artifact_helpers import BUCKET, S3, s3_server
from sagemaker_helpers import sagemaker_runtime, sdk_scripts
from server_helpers import Server, make_model, request, running
from waiting import wait_until

from frontend.sagemaker.async_invocations import _inline_body
from lmi_server.contract.errors import RequestError

OUTPUTS = f"s3://{BUCKET}/out"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("home")) as s3:
        yield s3


@pytest.fixture(scope="module")
def server(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model whose queue has room for one request beside the one that runs."""
    directory = tmp_path_factory.mktemp("async")
    model = make_model(directory / "model", echo_delay_ms=20, job_queue_size=1, max_rolling_batch_size=1)
    settings = {"SERVING_ASYNC_OUTPUT_PATH": OUTPUTS, "SERVING_ASYNC_INPUT_PATH": f"s3://{BUCKET}/in"}
    variables = {**s3.variables, **settings}
    with running(model, variables=variables, workers=1) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return sagemaker_runtime(server.port)


def body(prompt: str, tokens: int = 3) -> bytes:
    return json.dumps(request(prompt, tokens)).encode()


def written(s3: S3, location: str) -> bytes:
    """Wait for an object and return it."""
    key = location.removeprefix(f"s3://{BUCKET}/")
    found: list[bytes] = []

    def is_there() -> bool:
        objects = s3.client.list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents", [])
        found[:] = [s3.client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read() for entry in objects]
        return bool(found)

    wait_until(is_there, f"{location} is written")
    return found[0]


@pytest.mark.slow
def test_an_input_on_s3_has_its_output_there(client: Any, s3: S3) -> None:
    s3.put("in/request.json", body("a b c"))
    answer = client.invoke_endpoint_async(
        EndpointName="model",
        InputLocation=f"s3://{BUCKET}/in/request.json",
        ContentType="application/json",
        InferenceId="7",
        S3OutputPathExtension="today",
    )
    assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["InferenceId"]) == (202, "7")
    assert answer["OutputLocation"].startswith(f"{OUTPUTS}/today/")
    assert answer["FailureLocation"] == answer["OutputLocation"].replace(".out", "-error.out")
    assert json.loads(written(s3, answer["OutputLocation"])) == {"generated_text": " a b c"}


# Its own `predict` would keep the process until it has looked for a failure for the last time.
PREDICTOR = """
import json, time
from sagemaker.base_deserializers import JSONDeserializer
from sagemaker.base_serializers import JSONSerializer
from sagemaker.exceptions import ObjectNotExistedError
from sagemaker.predictor import Predictor
from sagemaker.predictor_async import AsyncPredictor
from sagemaker.session import Session

serializers = {"serializer": JSONSerializer(), "deserializer": JSONDeserializer()}
predictor = AsyncPredictor(Predictor("model", Session(), **serializers))
asked = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
answer = predictor.predict_async(asked, input_path="s3://BUCKET/in/of-the-sdk.json")
for _ in range(1200):
    try:
        print(json.dumps(answer.get_result()))
        break
    except ObjectNotExistedError:
        time.sleep(0.25)
"""


@pytest.mark.slow
def test_the_async_predictor_of_sagemakers_sdk(server: Server, s3: S3, tmp_path: Path) -> None:
    """It names no type of the input but that of the object, and waits for the output on S3."""
    url = f"http://127.0.0.1:{server.port}"
    code = PREDICTOR.replace("BUCKET", BUCKET)
    ran = sdk_scripts(tmp_path, {"async": code}, **s3.variables, AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=url)
    assert json.loads(ran.output("async").splitlines()[-1]) == {"generated_text": " a b a"}


def test_an_input_may_come_with_the_request(client: Any, s3: S3) -> None:
    answer = client.invoke_endpoint_async(EndpointName="model", Body=body("x"), Filename="mine.json")
    assert answer["OutputLocation"] == f"{OUTPUTS}/mine.json"
    assert json.loads(written(s3, answer["OutputLocation"])) == {"generated_text": " x x x"}


def test_requests_wait_for_their_place(client: Any, s3: S3) -> None:
    answers = [client.invoke_endpoint_async(EndpointName="model", Body=body(f"p{number}")) for number in range(6)]
    outputs = [json.loads(written(s3, answer["OutputLocation"]))["generated_text"] for answer in answers]
    assert outputs == [f" p{number}" * 3 for number in range(6)], "two have room at a time"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"Body": b"{"}, b"JSON"),
        ({"InputLocation": f"s3://{BUCKET}/in/none"}, b"s3://models/in/none"),
        ({"Body": body("a", 1_000_000), "InvocationTimeoutSeconds": 1}, b"x-request-timeout=1"),
    ],
)
def test_a_failure_is_written_in_its_place(client: Any, s3: S3, given: dict[str, Any], told: bytes) -> None:
    answer = client.invoke_endpoint_async(EndpointName="model", **given)
    assert told in written(s3, answer["FailureLocation"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"InputLocation": f"s3://{BUCKET}/other/request.json"}, "async_input_path"),
        ({"InputLocation": f"s3://{BUCKET}/in-other/request.json"}, "async_input_path"),
        ({"InputLocation": "s3://elsewhere/in/request.json"}, "async_input_path"),
        ({"InputLocation": f"https://{BUCKET}/in/request.json"}, "async_input_path"),
        ({}, "InputLocation"),
        ({"Body": b"x" * 128_001}, "128000"),
        ({"Body": b"x", "S3OutputPathExtension": "../up"}, "S3OutputPathExtension"),
        ({"Body": b"x", "Filename": "a/b"}, "Filename"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(client: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises(client.exceptions.ClientError) as raised:
        client.invoke_endpoint_async(EndpointName="model", **given)
    error = raised.value.response["Error"]
    assert (error["Code"], named in error["Message"]) == ("ValidationError", True), error


def test_times_have_limits(server: Server) -> None:
    for name, value in {"RequestTTLSeconds": "59", "InvocationTimeoutSeconds": "x"}.items():
        headers = {f"X-Amzn-SageMaker-{name}": value}
        answer = server.http.post("/endpoints/model/async-invocations", content=b"x", headers=headers)
        assert (answer.status_code, name in answer.json()["Message"]) == (400, True)


def test_without_a_place_for_outputs_it_is_off(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(make_model(tmp_path_factory.mktemp("off") / "model")) as server:
        answer = httpx.post(f"http://127.0.0.1:{server.port}/endpoints/model/async-invocations", content=b"x")
        assert (answer.status_code, "async_output_path" in answer.json()["Message"]) == (400, True)


def test_a_body_that_is_cut_is_no_request() -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    with pytest.raises(RequestError, match="has not arrived as a whole"):
        asyncio.run(_inline_body(receive))
