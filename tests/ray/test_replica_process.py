"""Replicas behind a front end: real processes and connections, and this test in the place of Ray."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_helpers import FrontEndProcess, ReplicaProcess, ending
from waiting import wait_until

from lmi_server.ray.messages import ReplicaFailed, ReplicaNeeded, ReplicaReady

STORED = ("one", "two", "three")  # adapters, one more than a replica keeps
SHORT, LONG = 5, 400  # tokens; a long answer takes four seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "model"
    directory.mkdir()
    keys = ("option.entryPoint=djl_python.echo", "option.echo_delay_ms=10", "option.enable_lora=true")
    on_demand = ("option.dynamic_lora_loading_path=stored", "option.max_num_adapters_per_replica=2")
    (directory / "serving.properties").write_text("\n".join((*keys, *on_demand)))
    for name in STORED:
        (directory / "stored" / name).mkdir(parents=True)
        (directory / "stored" / name / "adapter_config.json").write_text("{}")
    return directory


class Cluster:
    """A front end, and replicas that come and go."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.front_end = FrontEndProcess()
        self.processes: dict[str, ReplicaProcess] = {}
        self.serving: dict[str, ReplicaReady] = {}
        self._since: dict[str, str] = {}
        """When the front end has connected to the replicas that it knows."""

    def start(self, *names: str) -> None:
        """Start those of the replicas that do not run; the front end does not know them yet."""
        missing = [name for name in names if name not in self.serving or self._has_ended(name)]
        for name in missing:
            if name in self.processes:
                self.processes[name].end()
                self._since.pop(name, None)
        self.processes |= {name: ReplicaProcess(self._model) for name in missing}
        for name in missing:
            heard = self.processes[name].heard()
            assert isinstance(heard, ReplicaReady)
            self.serving[name] = heard

    def _has_ended(self, name: str) -> bool:
        return name in self.processes and self.processes[name].process.poll() is not None

    def announce(self, *names: str) -> None:
        """Tell the front end that these replicas run, started if need be, and wait until it has connected to each."""
        self.start(*names)
        known = [name for name in names if name in self._since]
        self._announce_further(known)
        for name in names:
            if name not in known:
                known.append(name)
                self._announce_further(known)

    def _announce_further(self, names: Sequence[str]) -> None:
        """Tell the front end of these replicas, of which it knows all but the last one or all; of no replicas nothing.

        What says that a replica is ready names none, so that only the time shows which one it is.
        """
        if not names:
            return
        self.front_end.knows(self.serving[names[-1]].model, {name: self.serving[name] for name in names})
        gone = {since for name, since in self._since.items() if name not in names}
        wait_until(
            lambda: len(ready := self._ready()) == len(names) and not ready & gone, f"{', '.join(names)} are connected"
        )
        ready = self._ready()
        self._since = {name: since for name, since in self._since.items() if name in names and since in ready}
        further = ready - {*self._since.values()}
        self._since |= {name: further.pop() for name in names if name not in self._since}

    def details(self) -> Any:
        """Return what the management API says of the model."""
        answer = self.front_end.http.get("/models/model")
        return answer.json()[0]["models"][0] if answer.status_code == 200 else {"workerGroups": []}

    def _ready(self) -> set[str]:
        """Return when the front end has connected to each replica that is ready."""
        workers = [worker for group in self.details()["workerGroups"] for worker in group["workers"]]
        return {worker["startTime"] for worker in workers if worker["status"] == "READY"}

    def ask(self, prompt: str, tokens: int = SHORT) -> httpx.Response:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
        return self.front_end.http.post("/invocations", json=body)

    def adapted(self, name: str) -> str:
        """Return what the adapter answers to "a", or the status if there is no answer."""
        chat = {"model": f"model:{name}", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        answer = self.front_end.http.post("/v1/chat/completions", json=chat)
        if answer.status_code != 200:
            return str(answer.status_code)
        return str(answer.json()["choices"][0]["message"]["content"])

    def lines(self, replica: str, text: str) -> int:
        """Return how many of the last lines of the log of a replica have `text`."""
        return sum(text in line for line in self.processes[replica].log.last_lines())

    def streaming(self, tokens: int) -> Stream:
        return Stream(self.front_end, tokens)


class Stream:
    """A streamed chat whose first token has arrived."""

    def __init__(self, front_end: FrontEndProcess, tokens: int) -> None:
        chat = {"model": "model", "messages": [{"role": "user", "content": "a b c"}]}
        self._client = httpx.Client(base_url=front_end.http.base_url, timeout=60)
        body = chat | {"stream": True, "max_tokens": tokens}
        request = self._client.build_request("POST", "/v1/chat/completions", json=body)
        self._response = self._client.send(request, stream=True)
        self.lines = self._response.iter_lines()
        assert next(self.lines).startswith("data: ")

    def rest(self) -> list[str]:
        """Return the further events, to the end of the stream."""
        return [line.removeprefix("data: ") for line in self.lines if line]

    def close(self) -> None:
        self._response.close()
        self._client.close()


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    cluster = Cluster(model)
    try:
        cluster.start("a", "b")
        yield cluster
    finally:
        with ending(cluster.front_end, *cluster.processes.values()):
            pass


def test_dialects_and_codes_are_those_of_one_machine(cluster: Cluster) -> None:
    cluster.announce("a")
    http = cluster.front_end.http
    assert http.get("/ping").json() == {"model": {"status": "Healthy"}}
    assert cluster.ask("a b", 3).json() == {"generated_text": " a b a"}
    chat = {"model": "model", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == " a b"
    assert http.post("/v1/messages", json=chat).json()["content"][0]["text"] == " a b"
    assert http.post("/v1/chat/completions", json=chat | {"max_tokens": -1}).status_code == 400
    assert http.post("/v1/chat/completions", json=chat | {"model": "other"}).status_code == 404
    assert http.post("/invocations", json={"inputs": 1}).status_code == 424
    listed = [(entry["id"], entry["parent"]) for entry in http.get("/v1/models").json()["data"]]
    assert listed == [("model", None), *((f"model:{name}", "model") for name in sorted(STORED))]


def test_a_stream_comes_piece_by_piece_and_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    cluster.announce("a")
    whole = cluster.streaming(SHORT)
    events = whole.rest()
    assert events[-1] == "[DONE]"
    assert len(events) > SHORT
    whole.close()
    gone = cluster.streaming(100 * LONG)
    gone.close()
    wait_until(lambda: cluster.front_end.metric("lmi_handler_running_requests") == 0, "the engine runs nothing")


@pytest.mark.slow
def test_a_front_end_is_not_ready_before_it_knows_its_models(cluster: Cluster) -> None:
    cluster.start("a")
    starting, replica = FrontEndProcess(), cluster.serving["a"]
    chat = {"model": "model", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
    with ending(starting):
        http = starting.http
        assert [http.get(path).status_code for path in ("/ping", "/health", "/-/healthz")] == [503] * 3
        assert http.get("/v2/health/ready").json() == {"ready": False}
        assert http.get("/health/live").status_code == 200
        unknown = [
            http.post("/v1/chat/completions", json=chat),
            http.post("/predictions/model", json={"inputs": "a"}),
            http.post("/invocations", json={"inputs": "a"}),
            http.options("/predictions/model"),
            http.get("/v1/models/model"),
            http.get("/models/model"),
            http.get("/info"),
        ]
        assert [answer.status_code for answer in unknown] == [503] * len(unknown)
        assert all("retry-after" in answer.headers for answer in unknown)
        starting.knows(None, {})
        wait_until(lambda: http.get("/models/model").status_code == 200, "it knows the model")
        loading = http.get("/models/model").json()[0]["models"][0]["loading"]
        assert (loading["what"], loading["done"], loading["total"]) == ("waiting for replicas of Ray", 0, 1)
        starting.knows(replica.model, {"a": replica})
        starting.log.wait_for("ready: API .*; try: curl ")
        assert sum("ready: API" in line for line in starting.log.lines) == 1
        assert http.get("/ping").status_code == 200
        assert http.get("/-/healthz").text == "success"
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert http.get("/v1/models/other").status_code == 404


def test_models_are_managed_by_ray_alone(cluster: Cluster) -> None:
    cluster.announce("a")
    http = cluster.front_end.http
    refused = [
        http.delete("/models/model"),
        http.post("/models", params={"url": "/nowhere", "model_name": "other"}),
        http.put("/models/model", params={"min_worker": 2}),
    ]
    assert [answer.status_code for answer in refused] == [400, 400, 400]
    assert all("lmi-server ray deploy" in answer.text for answer in refused)


@pytest.mark.slow
def test_a_new_version_brings_its_settings_and_names_and_ends_no_stream(cluster: Cluster) -> None:
    cluster.announce("a")

    def asked(name: str) -> int:
        return cluster.front_end.http.post(f"/predictions/{name}", json={"inputs": "a"}).status_code

    stream, replica = cluster.streaming(LONG), cluster.serving["a"]
    model = msgspec.structs.replace(replica.model, serving={**replica.model.serving, "job_queue_size": 7})
    before = cluster.details()["queueSize"]
    cluster.front_end.knows(model, {"a": replica}, aliases=("renamed",))
    wait_until(lambda: cluster.details()["queueSize"] == 7, "the front end has the new settings")
    assert (asked("model"), asked("renamed")) == (200, 200)
    cluster.announce("a")
    wait_until(lambda: cluster.details()["queueSize"] == before, "the front end has the old settings")
    assert (asked("model"), asked("renamed")) == (200, 404)
    events = stream.rest()
    stream.close()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def test_a_model_that_is_gone_finishes_its_streams_and_holds_up_no_other(cluster: Cluster) -> None:
    cluster.announce("a")
    replica = cluster.serving["a"]
    cluster.front_end.knows(replica.model, {"a": replica}, second=True)
    ready = {"model": {"status": "Healthy"}, "second": {"status": "Healthy"}}
    wait_until(lambda: cluster.front_end.http.get("/ping").json() == ready, "both models are ready")
    cluster.serving["again"] = replica
    body = {"inputs": "a", "parameters": {"max_new_tokens": 100 * LONG}, "stream": True}
    with cluster.front_end.http.stream("POST", "/predictions/second", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        cluster.announce("a", "again")
        assert len(list(islice(pieces, 100))) == 100
    cluster.announce("a")


def test_a_connection_without_the_token_gets_nothing(cluster: Cluster) -> None:
    cluster.announce("a")
    place = cluster.serving["a"].place
    with socket.create_connection((place.host, place.port), timeout=60) as intruder:
        intruder.sendall(b"x" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert intruder.recv(1) == b""
    assert cluster.ask("a").status_code == 200


@pytest.mark.slow
def test_a_replica_that_ends_finishes_its_streams_and_gets_no_new_requests(cluster: Cluster) -> None:
    cluster.announce("a")
    stream = cluster.streaming(LONG)
    cluster.processes["a"].drain()
    cluster.announce("b", "c")
    assert [cluster.ask("a").status_code for _ in range(4)] == [200] * 4
    events = stream.rest()
    stream.close()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert cluster.processes["a"].process.wait(60) == 0


@pytest.mark.slow
def test_an_adapter_reaches_the_replicas_that_are_there_and_those_that_come(cluster: Cluster, tmp_path: Path) -> None:
    http = cluster.front_end.http
    (tmp_path / "adapter_config.json").write_text("{}")
    cluster.announce("b")
    assert http.post("/models/model/adapters", params={"name": "x", "src": str(tmp_path)}).status_code == 200
    cluster.announce("b", "c")
    cluster.announce("c")
    chat = {"model": "x", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == " x: a"
    assert http.delete("/models/model/adapters/x").status_code == 200
    assert http.post("/v1/chat/completions", json=chat).status_code == 404
    cluster.announce("b", "c")


@pytest.mark.slow
def test_an_adapter_of_the_store_is_loaded_by_one_replica_when_it_is_asked_for(cluster: Cluster) -> None:
    cluster.announce("d", "e")  # which have loaded none
    asked = [name for _ in range(4) for name in STORED]
    assert [cluster.adapted(name) for name in asked] == [f" {name}: a" for name in asked]
    for name in STORED:
        line = f"loaded adapter {name}"
        wait_until(lambda line=line: cluster.lines("d", line) + cluster.lines("e", line) == 1, f"one line: {line}")
    assert cluster.lines("d", "removed adapter") + cluster.lines("e", "removed adapter") == 0


def test_an_adapter_that_the_store_lacks_is_not_found(cluster: Cluster) -> None:
    cluster.announce("b", "c")
    http, body = cluster.front_end.http, {"inputs": "a"}
    assert cluster.adapted("nobody") == "404"
    assert cluster.adapted("../model") == "404"
    assert http.post("/invocations", json=body | {"adapters": "nobody"}).status_code == 404
    header = {"X-Amzn-SageMaker-Adapter-Identifier": ".."}
    assert http.post("/invocations", json=body, headers=header).status_code == 404


def test_the_adapter_that_nobody_has_asked_for_longest_makes_room(cluster: Cluster) -> None:
    cluster.announce("c")
    asked = [STORED[number % 3] for number in range(12)]
    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(cluster.adapted, asked)) == [f" {name}: a" for name in asked]
    wait_until(lambda: cluster.lines("c", "removed adapter") > 0, "an adapter was removed")
    names = cluster.front_end.http.get("/models/model/adapters").json()["adapters"]
    assert names == []  # the list has what calls have registered


def test_a_request_that_waits_when_the_last_replica_goes_has_ray_start_another(cluster: Cluster) -> None:
    cluster.announce("c")
    replica = cluster.serving["c"]
    unreachable = msgspec.structs.replace(replica, place=msgspec.structs.replace(replica.place, port=1))
    cluster.front_end.knows(replica.model, {"gone": unreachable})
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(cluster.ask, "a b")
        wait_until(lambda: cluster.details()["requestInQueue"] == 1, "the request waits")
        cluster.front_end.knows(replica.model, {})
        assert cluster.front_end.heard() == ReplicaNeeded("model")
        missing = cluster.details()["loading"]
        assert (missing["unit"], missing["done"], missing["total"]) == ("replicas", 0, 1)
        cluster.announce("c")
        assert "loading" not in cluster.details()
        assert answer.result().status_code == 200


@pytest.mark.slow
def test_a_killed_replica_ends_its_streams_and_its_other_requests_go_to_the_next(cluster: Cluster) -> None:
    cluster.announce("b")
    stream = cluster.streaming(100 * LONG)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(cluster.ask("a b", LONG)))
    asking.start()
    wait_until(lambda: cluster.front_end.metric("lmi_handler_running_requests") == 2, "both requests run")
    cluster.processes["b"].process.kill()
    cluster.announce("c")
    asking.join(60)
    events = stream.rest()
    stream.close()
    assert "error" in json.loads(events[-1])
    assert [answer.status_code for answer in answers] == [200]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.entryPoint=djl_python.echo\noption.echo_delay_ms=-1\n")
    replica = ReplicaProcess(tmp_path)
    with ending(replica):
        heard = replica.heard()
        assert isinstance(heard, ReplicaFailed)
        assert "option.echo_delay_ms" in heard.reason
        assert replica.process.wait(60) == 1
