"""A container that serves one model, as SageMaker calls it: health checks, invocations, time limits, headers, the end.

The rules are those of "Custom Inference Code with Hosting Services" in SageMaker's guide and of its InvokeEndpoint API.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from artifact_helpers import write_wheel
from hosting_container import Container, packed, ready, started, write
from waiting import wait_until

pytestmark = pytest.mark.slow

# It waits for files in a directory, so that tests decide how long it takes.
GATED = """
import json
import os
import time
from djl_python import Input, Output

def wait_for(name):
    while not os.path.exists(os.path.join(os.environ["GATES"], name)):
        time.sleep(0.02)

def pieces(number, pause_s):
    for piece in range(number):
        time.sleep(pause_s)
        yield f"{piece};"

def handle(inputs):
    if inputs.is_empty():
        wait_for("load")
        return None
    task = inputs.get_as_json()
    if "wait_for" in task:
        wait_for(task["wait_for"])
    if "exit" in task:
        os._exit(task["exit"])
    if "pieces" in task:
        return Output().add_stream_content(pieces(task["pieces"], task["pause_s"]), output_formatter=None)
    region = os.environ.get("AWS_DEFAULT_REGION")
    output = Output().add_as_json({"properties": inputs.get_properties(), "process": os.getpid(), "region": region})
    for name, value in task.get("headers", {}).items():
        output.add_property(name, value)
    return output
"""


class Running(NamedTuple):
    """A container, a client of it, and the directory of the gates that its model waits for."""

    container: Container
    http: httpx.Client
    gates: Path

    def ask(self, task: dict[str, Any], **headers: str) -> httpx.Response:
        return self.http.post("/invocations", json=task, headers=headers)

    def ping(self) -> tuple[int, str]:
        """Return the code of /ping, and the status of the model."""
        answer = self.http.get("/ping")
        return answer.status_code, answer.json()["model"]["status"]


def gated(opt_ml: Path) -> Path:
    write(opt_ml / "model", model_py=GATED)
    (opt_ml / "gates").mkdir()
    return opt_ml / "gates"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    opt_ml = tmp_path_factory.mktemp("opt_ml")
    gates = gated(opt_ml)
    variables = {
        "GATES": str(gates),
        "SAGEMAKER_MAX_PAYLOAD_IN_MB": "1",
        "SAGEMAKER_NUM_MODEL_WORKERS": "1",
        "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
        "SAGEMAKER_REGION": "eu-north-1",
        "OPTION_MODEL_LOADING_TIMEOUT": "300",
    }
    with started(opt_ml, **variables) as (container, http):
        yield Running(container, http, gates)


def test_a_loading_model_answers_the_health_check_and_nothing_else(served: Running) -> None:
    assert served.ping() == (503, "PENDING")
    assert served.ask({}).status_code == 503
    (served.gates / "load").touch()
    wait_until(lambda: served.ping() == (200, "Healthy"), "the model is ready")


def test_the_health_check_waits_for_no_request(served: Running) -> None:
    """SageMaker allows it two seconds; here all workers are busy until it has been answered."""
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(served.ask, {"wait_for": "checked"}) for _ in range(8)]
        wait_until(lambda: 'lmi_requests_in_flight{model="model"} 1' in served.http.get("/metrics").text, "one runs")
        try:
            assert served.ping() == (200, "Healthy")
            assert not any(answer.done() for answer in asked)
        finally:
            (served.gates / "checked").touch()
        assert {answer.result().status_code for answer in asked} == {200}


def test_the_variables_of_the_platform_are_heeded(served: Running) -> None:
    ((element,), region) = served.http.get("/models/model").json(), served.ask({}).json()["region"]
    (group,) = element["models"][0]["workerGroups"]
    assert (group["minWorkers"], group["maxWorkers"], region) == (1, 1, "eu-north-1")


def test_the_largest_body_is_the_platform_s(served: Running) -> None:
    assert served.http.post("/invocations", content=b" " * (1 << 20) + b"{}").status_code == 413
    assert served.http.post("/invocations", content=b" " * ((1 << 20) - 2) + b"{}").status_code == 200


def test_the_headers_of_the_platform_reach_the_code(served: Running) -> None:
    sent = {
        "X-Amzn-SageMaker-Custom-Attributes": "c000b4f9-df62-4c85-a0bf-7c525f9104a4",
        "X-Amzn-SageMaker-Enable-Explanations": "`true`",
        "X-Amzn-SageMaker-Forwarded-Api": "InvokeEndpoint",
        "X-Amzn-SageMaker-Inference-Component": "component-1",
        "X-Amzn-SageMaker-Inference-Id": "inference-1",
        "X-Amzn-SageMaker-Session-Id": "NEW_SESSION",
        "X-Amzn-SageMaker-Target-Container-Hostname": "host-1",
        "X-Amzn-SageMaker-Target-Model": "model-1.tar.gz",
        "X-Amzn-SageMaker-Target-Variant": "variant-1",
        "Accept": "application/x-own",
    }
    answer = served.ask({}, **sent)
    got = answer.json()["properties"]
    assert {name: got.get(name) for name in sent} == sent
    assert (got["requestId"], answer.headers["x-request-id"]) == ("inference-1", "inference-1")
    named = served.ask({}, **{"X-Amzn-SageMaker-Custom-Attributes": "trace=1; x=2"}).json()["properties"]
    assert (named["trace"], named["x"]) == ("1", "2")


def test_the_headers_of_the_code_reach_the_platform(served: Running) -> None:
    sent = {
        "X-Amzn-SageMaker-Custom-Attributes": "trace=1;x=2",
        "X-Amzn-SageMaker-Session-Id": "session-1; Expires=2030-01-01T00:00:00Z",
        "X-Amzn-SageMaker-Closed-Session-Id": "session-0",
        "Content-Type": "text/csv",
    }
    answer = served.ask({"headers": sent})
    assert {name: answer.headers.get(name) for name in sent} == sent
    assert served.ask({}, **{"X-Amzn-SageMaker-Session-Id": "session-1"}).status_code == 200


def test_what_is_accepted_is_answered_before_the_container_ends(served: Running) -> None:
    """The last test of this container: SageMaker sends SIGTERM, and SIGKILL 30 seconds later."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(served.ask, {"wait_for": "ended"})
        wait_until(lambda: 'lmi_requests_in_flight{model="model"} 1' in served.http.get("/metrics").text, "it runs")
        served.container.process.terminate()
        served.container.log_line("draining: up to 20 seconds")
        (served.gates / "ended").touch()
        assert asked.result().status_code == 200
    assert served.container.ended() == 0
    assert served.container.errors == [], "the log is on standard output"


def test_time_limits_and_the_codes_of_the_health_check_are_settings(tmp_path: Path) -> None:
    """SageMaker waits 60 seconds for an answer and 8 minutes for the end of a stream. The limit here is on pauses."""
    gates = gated(tmp_path)
    variables = {
        "GATES": str(gates),
        "SAGEMAKER_HEALTH_CHECK_OVERRIDE": "true",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "8",
        "SERVING_PING_FAILED_HTTP_CODE": "203",
        "SERVING_PING_LOADING_HTTP_CODE": "202",
        "SERVING_RETRY_THRESHOLD": "1",
        "SERVING_WAIT_MODEL_LOADING": "false",
    }
    with started(tmp_path, **variables) as (container, http):
        server = Running(container, http, gates)
        assert server.ping() == (202, "PENDING")
        (gates / "load").touch()
        wait_until(lambda: server.ping() == (200, "Healthy"), "the model is ready")
        with http.stream("POST", "/invocations", json={"pieces": 9, "pause_s": 1}) as answer:
            assert (answer.status_code, answer.headers["transfer-encoding"]) == (200, "chunked")
            assert "".join(answer.iter_text()) == "0;1;2;3;4;5;6;7;8;"
        (gates / "load").unlink()
        late = server.ask({"wait_for": "never"})
        assert (late.status_code, "predict_timeout=8" in late.json()["message"]) == (503, True), late.text
        wait_until(lambda: server.ping() == (500, "Unhealthy"), "the worker has ended")
        (gates / "load").touch()
        wait_until(lambda: server.ping() == (200, "Healthy"), "the model is ready again")
        assert server.ask({"exit": 1}).status_code == 503
        wait_until(lambda: server.ping() == (203, "FAILED"), "its workers have ended too often")


# --- what is in /opt/ml/model ---

SCRIPT = """
import os
from helper import doubled
from shipped import FACTOR

def model_fn(model_dir):
    with open(os.path.join(model_dir, "factor.txt")) as file:
        return int(file.read())

def input_fn(body, content_type):
    return int(body)

def predict_fn(data, model):
    return doubled(data) * model * FACTOR

def output_fn(prediction, accept):
    return f"{accept}: {prediction}", "text/plain"
"""
WHERE = """
from djl_python import Output

def handle(inputs):
    return None if inputs.is_empty() else Output().add_as_json(inputs.get_property("model_dir"))
"""


SESSION = "X-Amzn-SageMaker-Session-Id"
QUESTION = {"inputs": "a", "parameters": {"max_new_tokens": 2}}


def tree(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def test_an_archive_with_a_script_for_the_framework_containers(tmp_path: Path) -> None:
    files = write(
        tmp_path / "files",
        factor_txt="7",
        code__inference_py=SCRIPT,
        code__helper_py="def doubled(x):\n    return 2 * x\n",
        code__requirements_txt="shipped==1.0",
    )
    write_wheel(files / "code" / "wheelhouse", "shipped", "1.0", "FACTOR = 10")
    packed(files, tmp_path / "model" / "model.tar.gz")
    before = tree(tmp_path / "model")
    with ready(tmp_path, SAGEMAKER_PROGRAM="inference.py", SAGEMAKER_SUBMIT_DIRECTORY="/opt/ml/model/code") as (
        _,
        http,
    ):
        headers = {"content-type": "text/csv", "accept": "text/x"}
        answer = http.post("/invocations", content=b"3", headers=headers)
        assert (answer.status_code, answer.text, answer.headers["content-type"]) == (200, "text/x: 420", "text/plain")
    assert tree(tmp_path / "model") == before, "/opt/ml/model is read-only on SageMaker"


def test_variables_alone_configure_a_directory_of_weights(tmp_path: Path) -> None:
    write(tmp_path / "model", config_json="{}", weights_bin="")
    variables = {"OPTION_ENABLE_STATEFUL_SESSIONS": "true", "OPTION_SESSIONS_PATH": str(tmp_path / "sessions")}
    with ready(tmp_path, OPTION_ENTRYPOINT="djl_python.echo", OPTION_BATCH_SIZE="1", **variables) as (_, http):
        answer = http.post("/invocations", json=QUESTION)
        assert answer.json() == {"generated_text": " a a"}
        check_sessions(http)
    assert len(tree(tmp_path / "model")) == 2


def check_sessions(http: httpx.Client) -> None:
    """Open, use and close a session, as InvokeEndpoint with SessionId does."""

    def ask(body: dict[str, Any], session: str) -> httpx.Response:
        return http.post("/invocations", json=body, headers={SESSION: session})

    opened = ask({"requestType": "NEW_SESSION"}, "NEW_SESSION")
    session, expires = opened.headers[SESSION].split("; Expires=")
    assert (opened.status_code, len(expires)) == (200, len("2030-01-01T00:00:00Z"))
    assert ask(QUESTION, session).status_code == 200
    closed = ask({"requestType": "CLOSE"}, session)
    assert (closed.status_code, closed.headers["X-Amzn-SageMaker-Closed-Session-Id"]) == (200, session)
    assert ask(QUESTION, session).status_code >= 400


def test_a_model_among_the_additional_data_sources(tmp_path: Path) -> None:
    """CreateModel's AdditionalModelDataSources; /opt/ml/model itself is empty then."""
    base = write(tmp_path / "additional-model-data-sources" / "base", model_py=WHERE)
    (tmp_path / "model").mkdir()
    with ready(tmp_path, OPTION_MODEL_ID=str(base)) as (container, http):
        assert http.post("/invocations", json={}).json() == str(base)
        assert http.get("/models").json()["models"][0]["modelName"] == "base"
        assert container.stop() == 0
