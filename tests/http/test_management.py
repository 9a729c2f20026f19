"""Several models in one server, and LMI's management API, over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from relay_helpers import FAULTS, on_loop
from server_helpers import Server, connect, make_model, raw_request, received, request, running
from waiting import wait_until


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with models; those under "start" are loaded at the start."""
    directory = tmp_path_factory.mktemp("models")
    make_model(directory / "start" / "first", served_model_name="alias")
    make_model(directory / "start" / "second")
    make_model(directory / "echo")
    make_model(directory / "failing", "fault_handlers:FailingHandler")
    make_model(directory / "greedy", "fault_handlers:GreedyHandler")
    make_model(directory / "huge", required_memory_mb="1000000000", reserved_memory_mb="0")
    make_model(directory / "reserving", reserved_memory_mb="1000000000")
    make_model(directory / "wrong", job_queue_size="0")
    return directory


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store / "start", workers=2) as server:
        yield server


def register(server: Server, url: Path | str, **parameters: Any) -> httpx.Response:
    return server.http.post("/models", params={"url": str(url), **parameters})


LONG = "x" * 300  # than the name of a file may be


@pytest.mark.parametrize(
    ("method", "path", "parameters", "status"),
    [
        ("POST", "/models", {"url": "file://[::1/nowhere"}, 404),
        ("POST", "/models", {"url": f"{LONG}/{LONG}"}, 404),
        ("POST", "/models", {"url": "/tmp/a\0b"}, 400),
        ("POST", "/models", {"url": "a", "option.\0": "b"}, 400),
        ("PUT", "/models/first", {"device": "9" * 5000}, 400),
        ("PUT", "/models/first", {"min_worker": "9" * 5000}, 400),
        ("PUT", "/models/first", {"min_worker": 1_000_000_000}, 400),
        ("PUT", "/models/first", {"min_worker": 1, "max_worker": 1001}, 400),
        ("POST", "/models", {"url": "a", "min_worker": 1_000_000_000}, 400),
    ],
)
def test_parameters_that_no_file_and_no_number_can_have(
    server: Server, method: str, path: str, parameters: dict[str, str], status: int
) -> None:
    answer = server.http.request(method, path, json=parameters)
    assert (answer.status_code, answer.json()["code"]) == (status, status), answer.text


def test_a_form_of_openai_s_names_the_model_as_json_does(server: Server) -> None:
    """With files, as for /v1/images/edits, an OpenAI request is a form; on LMI's paths `model` is a field as any."""
    parts = {"image": b"png", "prompt": (None, "a")}
    unknown = server.http.post("/v1/images/edits", files={**parts, "model": (None, "nobody")})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "nobody" in unknown.json()["error"]["message"]


def test_a_form_names_a_model_in_any_bytes(server: Server) -> None:
    part = b'--b\r\ncontent-disposition: form-data; name="model_name"\r\n\r\n\xff\r\n--b--\r\n'
    answer = server.http.post("/invocations", content=part, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status_code, answer.json()["type"]) == (404, "ModelNotFoundException")


def until_status(server: Server, path: str, status: str) -> dict[str, Any]:
    """Ask for a model until it has this status, and return what describes it then."""
    wait_until(lambda: server.described(path)["status"] == status, f"{path} is {status}")
    return server.described(path)


def test_requests_go_to_the_model_that_they_name(server: Server) -> None:
    body = request("a b")
    for path in ("/predictions/first", "/models/second/invoke", "/invocations?model_name=alias"):
        assert server.http.post(path, json=body).json() == {"generated_text": " a b a"}
    nameless = server.http.post("/invocations", json=body)
    assert (nameless.status_code, nameless.json()["message"]) == (400, "Parameter model_name is required.")
    for form in ({"data": {"model_name": "third"}}, {"files": {"model_name": (None, "third")}}):
        named = server.http.post("/invocations", **form)
        assert (named.status_code, named.json()["message"]) == (404, "Model or workflow not found: third")
    completion = {"model": "second", "prompt": "a", "max_tokens": 1}
    assert server.http.post("/v1/completions", json=completion).json()["model"] == "second"
    assert server.http.post("/v1/completions", json={**completion, "model": "third"}).status_code == 404
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["first", "alias", "second"]


def test_the_list_and_its_pages(server: Server, store: Path) -> None:
    rows = [
        {"modelName": name, "modelUrl": f"file:{store}/start/{name}/", "status": "READY"}
        for name in ("first", "second")
    ]
    assert server.http.get("/models").json() == {"models": rows}
    page = server.http.get("/models", params={"limit": 1}).json()
    assert page == {"nextPageToken": "1", "models": rows[:1]}
    page = server.http.get("/models", params={"limit": 1, "next_page_token": page["nextPageToken"]}).json()
    assert page == {"models": rows[1:]}
    assert server.http.get("/models?next_page_token=9&limit=0").json() == {"models": []}
    workflows = server.http.get("/workflows?limit=101").json()
    assert workflows == {"workflows": [{"workflowName": name} for name in ("first", "second")]}
    assert server.http.get("/models?limit=x").status_code == 400


def test_the_description(server: Server, store: Path) -> None:
    (element,) = server.http.get("/models/first").json()
    model = element["models"][0]
    (group,) = model.pop("workerGroups")
    (worker,) = group.pop("workers")
    assert element == {"workflowName": "first", "models": [model]}
    assert model == {
        "modelName": "first",
        "modelUrl": f"file:{store}/start/first/",
        "batchSize": 1,
        "maxBatchDelayMillis": 100,
        "maxIdleSeconds": 60,
        "queueSize": 1000,
        "requestInQueue": 0,
        "status": "Healthy",
        "loadedAtStartup": True,
    }
    assert group == {"device": {"deviceType": "cpu", "deviceId": -1}, "minWorkers": 1, "maxWorkers": 1}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", worker.pop("startTime"))
    assert worker.pop("pid") > 0
    assert worker == {"id": 1, "status": "READY", "requestsInFlight": 0}
    assert server.http.get("/workflows/first").json()[0]["workflowName"] == "first"


def test_register_scale_and_unregister(server: Server, store: Path) -> None:
    response = register(server, store / "echo", job_queue_size=5, max_worker=4)
    assert (response.status_code, response.json()) == (200, {"status": 'Model "echo" registered.'})
    assert server.http.post("/predictions/echo", json=request("a")).status_code == 200
    response = server.http.put("/models/echo?min_worker=2&max_worker=-1")
    assert response.json() == {
        "status": 'Workflow "echo" worker scaled. New Worker configuration min workers:2 max workers:4'
    }
    model = server.described("echo")
    assert (model["queueSize"], model["loadedAtStartup"]) == (5, False)
    assert [worker["id"] for worker in model["workerGroups"][0]["workers"]] == [1, 2]
    assert 'lmi_workers_ready{model="echo"} 2.0' in server.http.get("/metrics").text
    response = server.http.delete("/models/echo")
    assert (response.status_code, response.json()) == (200, {"status": 'Model or workflow "echo" unregistered'})
    assert server.http.post("/predictions/echo", json=request("a")).status_code == 404
    assert 'model="echo"' not in server.http.get("/metrics").text


def test_a_registration_in_json(server: Server, store: Path) -> None:
    body = {"model_name": "json", "url": str(store / "echo"), "min_worker": 1, "synchronous": False}
    response = server.http.post("/models", json=body)
    assert (response.status_code, response.json()) == (202, {"status": 'Model "json" registration scheduled.'})
    until_status(server, "json", "Healthy")
    assert server.http.delete("/models/json").status_code == 200


def test_zero_and_minus_one_leave_a_number_as_it_is_configured(server: Server, store: Path) -> None:
    numbers = ("batch_size", "job_queue_size", "max_batch_delay", "max_idle_time", "max_worker")
    for value in (0, -1):
        response = register(server, store / "echo", **dict.fromkeys(numbers, value), min_worker=-1)
        assert (response.status_code, response.text) == (200, '{\n  "status": "Model \\"echo\\" registered."\n}\n')
        model = server.described("echo")
        assert [model[key] for key in ("batchSize", "queueSize", "maxBatchDelayMillis", "maxIdleSeconds")] == [
            *(1, 1000, 100, 60)
        ]
        assert (model["workerGroups"][0]["minWorkers"], model["workerGroups"][0]["maxWorkers"]) == (1, 1)
        server.http.delete("/models/echo")


def test_a_model_without_a_version_goes_and_its_versions_stay(server: Server, store: Path) -> None:
    for version in ("", "1"):
        assert register(server, store / "echo", model_name="both", model_version=version).status_code == 200
    assert server.http.delete("/models/both?model_version=2").status_code == 404
    assert server.http.delete("/models/both?model_version=").status_code == 200
    assert [element["version"] for element in server.http.get("/models/both").json()] == ["1"]
    assert server.http.delete("/models/both?model_version=").status_code == 404
    assert server.http.delete("/models/both?model_version=1").status_code == 200
    assert server.http.get("/models/both").status_code == 404


def test_versions_take_turns(server: Server, store: Path) -> None:
    for version in ("1", "2"):
        assert register(server, store / "echo", model_name="m", model_version=version).status_code == 200
    for version, label in {"2": "m:2", "": "m"}.items():
        again = register(server, store / "echo", model_name="m", model_version=version)
        assert (again.status_code, again.json()["message"]) == (409, f"Workflow {label} is already registered.")
    for _ in range(6):
        server.http.post("/predictions/m", json=request("a"))
    for _ in range(3):
        server.http.post("/predictions/m/2", json=request("a"))
    server.http.post("/invocations?model_name=m&model_version=2", json=request("a"))
    server.http.post("/predictions/m?model_version=2", json=request("a"))
    server.http.post("/models/m/2/invoke", json=request("a"))
    text = server.http.get("/metrics").text
    assert 'lmi_requests_total{code="200",model="m:1"} 3.0' in text
    assert 'lmi_requests_total{code="200",model="m:2"} 9.0' in text
    assert server.http.post("/predictions/m/3", json=request("a")).status_code == 404
    assert server.http.post("/invocations?model_name=m&model_version=3", json=request("a")).status_code == 404
    assert server.http.post("/predictions/m?model_version=3", json=request("a")).status_code == 200  # as in LMI
    assert [element["version"] for element in server.http.get("/models/m").json()] == ["1", "2"]
    assert [element["version"] for element in server.http.get("/models/m/2").json()] == ["2"]
    assert server.http.get("/ping").json().keys() == {"first", "second", "m"}
    assert server.http.delete("/models/m/1").status_code == 200
    assert server.http.get("/models/m/1").status_code == 404
    assert server.http.post("/predictions/m", json=request("a")).status_code == 200
    assert server.http.delete("/models/m").status_code == 200
    assert server.http.get("/models/m").status_code == 404


@pytest.mark.parametrize(
    ("name", "status", "kind", "message"),
    [
        ("failing", 500, "EngineException", "the weights are missing"),
        ("greedy", 507, "WlmOutOfMemoryException", "the weights do not fit: 17 GiB are not free"),
        ("huge", 507, "WlmOutOfMemoryException", "with what stays reserved 1000000000 MiB are needed, "),
        ("reserving", 507, "WlmOutOfMemoryException", "reserved_memory_mb: with what stays reserved 1000000000 MiB"),
        ("wrong", 400, "IllegalConfigurationException", 'serving.properties:3: job_queue_size = "0" is not allowed'),
        ("nowhere", 404, "ModelNotFoundException", "there is no directory"),
    ],
)
def test_a_registration_that_fails(
    server: Server, store: Path, name: str, status: int, kind: str, message: str
) -> None:
    response = register(server, store / name)
    assert (response.status_code, response.json()["code"], response.json()["type"]) == (status, status, kind)
    assert message in response.json()["message"]
    assert server.http.get(f"/models/{name}").status_code == 404, "nothing is left of it"
    scheduled = register(server, store / name, synchronous="false")
    assert scheduled.status_code == 202
    model = until_status(server, name, "FAILED")
    assert message in model["reason"]
    assert server.http.get("/ping").json()[name] == {"status": "FAILED"}
    assert server.http.get("/ping").status_code == 200, "the others serve on"
    refused = server.http.post(f"/predictions/{name}", json=request("a"))
    assert (refused.status_code, message in refused.json()["message"]) == (503, True)
    assert server.http.put(f"/models/{name}?min_worker=2").status_code == 503
    assert server.http.delete(f"/models/{name}").status_code == 200
    assert any(f"model {name} could not be loaded: " in line for line in drained(server))


@pytest.mark.parametrize(("parameters", "name"), [({}, "team--filed"), ({"model_name": "given"}, "given")])
def test_a_model_file_names_its_model_unless_the_registration_does(
    server: Server, tmp_path: Path, parameters: dict[str, str], name: str
) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "m.yaml"
    file.write_text("model_loading_config: {model_id: team/filed, model_source: /nowhere}\n")
    scheduled = register(server, file, synchronous="false", **parameters)
    assert scheduled.json() == {"status": f'Model "{name}" registration scheduled.'}
    assert server.http.delete(f"/models/{name}").status_code == 200


def drained(server: Server) -> list[str]:
    """Return the log so far."""
    server.http.get("/v1/nope")
    server.http.post("/models", params={"url": "/log/marker"})
    server.log_line("model marker could not be loaded")
    return server.lines


def test_bad_parameters(server: Server, store: Path) -> None:
    http = server.http
    echo = str(store / "echo")
    workflow = store / "workflow"
    workflow.mkdir()
    (workflow / "workflow.json").write_text("{}")
    register(server, echo, model_name="first", model_version="1")
    calls = [
        (400, http.post("/models"), "Parameter url is required."),
        (400, http.post("/models", json={"model_name": "x"}), "Parameter url is required."),
        (400, http.post("/workflows?template=adapter&model=x"), "Parameter template: workflows are not served;"),
        (400, register(server, workflow), "workflow.json: workflows are not served; register each of its models"),
        (400, http.post("/models", content=b"{", headers={"content-type": "application/json"}), "not a JSON object"),
        (400, register(server, echo, min_worker="two"), 'Parameter min_worker is "two"; it takes an integer'),
        (400, register(server, echo, batch_size="abc"), 'registration: batch_size = "abc" is not allowed'),
        (400, register(server, echo, batch_size="99999999999"), "allowed: an integer from 1 to 2147483647"),
        (404, register(server, "nope"), "name one, also of the model store, by its full path, or a model of the"),
        (400, register(server, echo, synchronous="perhaps"), "it takes true or false"),
        (400, http.put("/models/first?min_worker=3&max_worker=2"), "min_worker is 3, max_worker 2"),
        (400, http.put("/models/first?min_worker=-2"), "an integer from 0 to 1000, or -1 for no change"),
        (400, http.put("/models/first?min_worker=1000000000"), "min_worker is 1000000000; it takes"),
        (400, http.put("/models/first?max_worker=1000000000"), "max_worker is 1000000000; it takes"),
        (400, register(server, echo, min_worker="1000000000"), "min_worker is 1000000000; it takes"),
        (400, http.put("/models/first?device=tpu"), 'Parameter device is "tpu"'),
        (400, http.put("/models/first?device=gpu3"), "Parameter device is 3"),
        (404, http.put("/models/other?min_worker=1"), "Model or workflow not found: other"),
        (404, http.delete("/models/other"), "Model or workflow not found: other"),
        (404, http.get("/models/first/2"), "Model or workflow not found: first/2"),
        (409, register(server, echo, model_name="first"), "Workflow first is already registered."),
        (409, register(server, echo, model_name="alias"), "Workflow alias is already registered."),
        (409, register(server, echo, model_name="first:1"), "Workflow first:1 is already registered."),
        (400, register(server, echo, model_name="a/b"), "no path reaches a name with a slash"),
        (400, register(server, echo, model_version="1/2"), "no path reaches a name with a slash"),
        (400, http.get("/server/logging?level=loud"), 'Parameter level is "loud"; it takes trace, debug, info'),
        (405, http.patch("/models/first"), "use DELETE, GET, PUT"),
    ]
    for status, response, message in calls:
        assert (response.status_code, response.json()["code"]) == (status, status)
        assert message in response.json()["message"]
    server.http.delete("/models/first/1")
    assert register(server, store / "start" / "first", model_name="x").json()["message"].endswith("choose another")
    assert server.http.get("/ping").json().keys() == {"first", "second"}


def test_deleting_a_model_waits_for_its_requests(server: Server, store: Path) -> None:
    make_model(store / "slow", echo_delay_ms=2)
    register(server, store / "slow")
    with connect(server, raw_request("a", 300, stream=True, path="/predictions/slow", close=True)) as running:
        begun = received(running, until=b'"token"')
        assert server.http.delete("/models/slow").status_code == 200
        running.settimeout(0)
        whole = begun + running.recv(1 << 20)
        assert whole.count(b'"token"') == 300, "the answer was complete before the model was gone"


@pytest.mark.slow
@on_loop
async def test_nobody_is_disturbed_by_models_that_come_and_go(server: Server, store: Path) -> None:
    base = f"http://127.0.0.1:{server.port}"
    limits = httpx.Limits(max_connections=300)
    make_model(store / "busy", echo_delay_ms=10, max_rolling_batch_size=40)
    async with httpx.AsyncClient(base_url=base, timeout=60, limits=limits) as http:
        assert (await http.post("/models", params={"url": str(store / "busy")})).status_code == 200

        async def churn(name: str) -> None:
            parameters = {"url": str(store / "echo"), "model_name": name}
            assert (await http.post("/models", params=parameters)).status_code == 200
            assert (await http.put(f"/models/{name}?min_worker=2")).status_code == 200
            assert (await http.put(f"/models/{name}?min_worker=1&max_worker=1")).status_code == 200
            failing = {"url": str(store / "failing"), "model_name": f"{name}-failing"}
            assert (await http.post("/models", params=failing)).status_code == 500
            assert (await http.delete(f"/models/{name}")).status_code == 200

        async def keep_asking(number: int) -> None:
            while not churned.is_set():
                response = await http.post("/predictions/busy", json=request("a", 100, stream=number % 2 == 0))
                assert response.status_code == 200
                if number % 2 == 0:
                    assert len(response.text.splitlines()) == 100
                else:
                    assert json.loads(response.text)["generated_text"] == " a" * 100

        churned = asyncio.Event()
        clients = [asyncio.create_task(keep_asking(number)) for number in range(60)]
        await asyncio.gather(*(churn(name) for name in ("x", "y")))
        assert not any(client.done() for client in clients)
        churned.set()
        await asyncio.gather(*clients)
        assert (await http.delete("/models/busy")).status_code == 200
        assert (await http.get("/ping")).json() == {"first": {"status": "Healthy"}, "second": {"status": "Healthy"}}


def test_one_start_up_model_answers_what_names_none(tmp_path: Path) -> None:
    first, more = make_model(tmp_path / "first"), make_model(tmp_path / "more")
    with running(first, workers=1) as server:
        register(server, more)
        assert server.http.post("/invocations", json=request("a")).status_code == 200
        completion = {"model": "more", "prompt": "a", "max_tokens": 1}
        assert server.http.post("/v1/completions", json=completion).json()["model"] == "more"
        assert 'model="first"} 1.0' in server.http.get("/metrics").text


def test_a_server_without_models(tmp_path: Path) -> None:
    with running() as server:
        assert (server.http.get("/ping").status_code, server.http.get("/ping").json()) == (200, {})
        assert server.http.get("/models").json() == {"models": []}
        assert server.http.post("/invocations", json=request("a")).status_code == 400


def test_a_hung_request_is_given_up_with_503(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model", FAULTS, predict_timeout=1), workers=1) as server:
        response = server.invoke("wait")
        assert (response.status_code, response.json()["type"]) == (503, "WlmException")
        assert "predict_timeout=1" in response.json()["message"]
        assert server.invoke("a").status_code == 200


def test_archives_of_a_store_are_loaded(tmp_path: Path) -> None:
    make_model(tmp_path / "source")
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "source", arcname=".")
    (tmp_path / "source" / "serving.properties").unlink()
    (tmp_path / "source").rmdir()
    variables = {"SERVING_DOWNLOAD_DIR": str(tmp_path.parent / f"{tmp_path.name}-downloads")}
    with running("--model-store", tmp_path, variables=variables) as server:
        until_status(server, "packed", "Healthy")
        assert server.http.post("/invocations", json=request("a")).status_code == 200


def test_the_log_level_changes_at_run_time(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model", "fault_handlers:TalkativeHandler"), workers=1) as server:
        server.invoke("before")
        assert server.http.get("/server/logging?level=DEBUG").json() == {"status": "OK"}
        server.invoke("between")
        server.http.put("/models/model?min_worker=2")
        assert server.http.get("/server/logging?level=off").json() == {"status": "OK"}
        assert register(server, "/nowhere").status_code == 404
        server.http.post("/server/logging")
        server.invoke("after")
        for level, prompt in (("debug", "of-its-own"), ("error", "not-any-more")):
            assert server.http.put(f"/server/logging?level={level}&logger=fault_handlers").status_code == 200
            server.invoke(prompt)
        assert server.stop() == 0
        order = [line.rpartition(" ")[2].strip() for line in server.lines if "fault_handlers: " in line]
        assert order == ["between", "started", "of-its-own"]
        assert not any("ERROR" in line for line in server.lines)


def test_management_may_have_a_port_of_its_own(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), variables={"SERVING_MANAGEMENT_PORT": "0"}) as server:
        port = int(server.log_line(r"listening on http://127\.0\.0\.1:(\d+) for management")[1])
        server.log_line(r"\] ready: process")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as management:
            assert management.get("/models/model").status_code == 200
            assert management.get("/server/metrics").text.startswith("# HELP")
            refused = [management.post(path, json=request("a")) for path in ("/invocations", "/predictions/model")]
            assert [response.status_code for response in refused] == [404, 404]
            assert management.get("/ping").status_code == 200
        assert server.http.get("/ping").status_code == 200
        assert server.invoke("a").status_code == 200
        for path in ("/models", "/models/model", "/metrics", "/server/logging"):
            assert server.http.get(path).status_code == 404
        assert server.http.delete("/models/model").status_code == 404


def test_with_allow_multi_status_ping_answers_207(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "good"), variables={"SERVING_ALLOW_MULTI_STATUS": "true"}) as server:
        until_status(server, "good", "Healthy")
        assert server.http.get("/ping").status_code == 200
        register(server, tmp_path / "nowhere", synchronous="false")
        until_status(server, "nowhere", "FAILED")
        assert server.http.get("/ping").status_code == 207


@pytest.mark.slow
def test_a_multi_model_endpoint_estimates_memory_by_the_files(store: Path, tmp_path: Path) -> None:
    """SageMaker unloads other models when loading one more is answered with 507."""
    large = make_model(tmp_path / "large")
    with (large / "weights.bin").open("wb") as weights:
        weights.truncate(8 << 40)  # a sparse file of 8 TiB
    variables = {"SAGEMAKER_MULTI_MODEL": "true"}
    with running(store / "start" / "first", variables=variables, workers=1) as server:
        refused = register(server, large)
        assert (refused.status_code, refused.json()["type"]) == (507, "WlmOutOfMemoryException")
        assert re.search(r"required_memory_mb: .* 10\d{6} MiB are needed", refused.json()["message"])
        assert register(server, store / "echo").status_code == 200
        assert server.http.get("/ping").status_code == 200
