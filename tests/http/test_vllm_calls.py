"""vLLM's calls that manage a model: sleep and wake, adapters, the prefix cache, and the end of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from relay_helpers import on_loop
from server_helpers import Server, connect, make_model, raw_request, received, request, running
from waiting import wait_until

from frontend.vllm_calls.sleeping import Sleepers
from lmi_server.contract.errors import DeadlineError, ModelNotReadyError, QueueFullError
from lmi_server.contract.protocol import Command
from lmi_server.serving.pool.availability import Gate
from lmi_server.supervisor.job import Deadline, until_deadline


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("models")
    for name in ("model", "batches"):
        make_model(store / name, enable_lora="true", echo_delay_ms=20, minWorkers=1, maxWorkers=1)
    (store / "batches" / "serving.properties").write_text("engine=Python\nminWorkers=1\nmaxWorkers=1\n")
    (store / "batches" / "model.py").write_text(
        "from djl_python import Output\n\ndef handle(inputs):\n    return Output().add(b'own')\n"
    )
    (store / "model" / "adapters").mkdir()
    (store / "elsewhere").mkdir()
    with running(store / "model", store / "batches") as server:
        wait_until(lambda: server.http.get("/health").status_code == 200, "both models are loaded")
        yield server


def call(server: Server, path: str, body: Any = None, **parameters: Any) -> httpx.Response:
    return server.http.post(path, params={"model": "model"} | parameters, json=body)


def is_sleeping(server: Server) -> bool:
    return bool(server.http.get("/is_sleeping", params={"model": "model"}).json()["is_sleeping"])


def ask(server: Server, tokens: int = 2) -> httpx.Response:
    return server.http.post("/predictions/model", json=request("a b", tokens))


def workers(server: Server) -> list[int]:
    described = server.http.get("/models/model").json()[0]["models"][0]
    return [worker["pid"] for group in described["workerGroups"] for worker in group["workers"]]


@contextlib.contextmanager
def asleep(server: Server, level: int) -> Iterator[None]:
    assert call(server, "/sleep", level=level).json() == {"status": "sleeping", "level": level}
    yield
    assert call(server, "/wake_up").json() == {"status": "awake", "tags": None}
    assert ask(server).status_code == 200


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_model_that_sleeps_refuses_requests_and_says_how_it_wakes(server: Server, level: int) -> None:
    assert not is_sleeping(server)
    with asleep(server, level):
        assert is_sleeping(server)
        refused = ask(server)
        assert refused.status_code == 503
        assert "POST /wake_up" in refused.text
        assert "retry-after" in refused.headers
        assert server.http.post("/predictions/batches", content=b"x").text == "own", "the other model is awake"
        described = server.http.get("/models/model").json()[0]["models"][0]
        assert described["sleep"] == {"isSleeping": True, "level": level}
        assert len(workers(server)) == (0 if level == 2 else 1)
        assert server.http.get("/ping").status_code == 200
    assert not is_sleeping(server)


def test_requests_finish_before_a_model_sleeps_unless_they_are_aborted(server: Server) -> None:
    for mode, status in (("wait", 200), ("abort", 503)):
        with ThreadPoolExecutor() as threads:
            running_one = threads.submit(ask, server, 40)
            server.until("lmi_requests_in_flight", 1)
            assert call(server, "/sleep", mode=mode).status_code == 200
            assert running_one.result().status_code == status
        assert call(server, "/wake_up").status_code == 200


def test_a_stream_that_is_aborted_ends_with_an_error_and_nothing_after_it(server: Server) -> None:
    with connect(server, raw_request("a b", 400, stream=True, close=True, path="/predictions/model")) as client:
        begun = received(client, b'"token"')
        for unknown in (["unknown"], []):
            assert call(server, "/abort", {"request_ids": unknown}).json() == {"status": "aborted", "aborted": 0}
        assert call(server, "/abort_requests").json() == {"status": "aborted", "aborted": 1}
        answer = begun + received(client)
    assert answer.count(b"aborted by a call") >= 1
    assert answer.endswith(b"0\r\n\r\n")
    server.until("lmi_requests_in_flight", 0)


def test_requests_are_aborted_by_the_id_that_the_client_gave(server: Server) -> None:
    def send(name: str) -> httpx.Response:
        return server.http.post("/predictions/model", json=request("a", 30), headers={"x-request-id": name})

    with ThreadPoolExecutor() as threads:
        answers = {name: threads.submit(send, name) for name in ("one", "two")}
        server.until("lmi_requests_in_flight", 2)
        assert call(server, "/abort_requests", {"request_ids": ["one"]}).json()["aborted"] == 1
        assert {name: answer.result().status_code for name, answer in answers.items()} == {"one": 503, "two": 200}


def test_many_calls_at_once_leave_a_model_awake_or_asleep(server: Server) -> None:
    barrier = threading.Barrier(8)

    def send(index: int) -> httpx.Response:
        barrier.wait()
        return call(server, "/wake_up" if index % 2 else "/sleep", **({} if index % 2 else {"level": index // 2 % 3}))

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(8)))
    assert {answer.status_code for answer in answers} <= {200, 400}, [answer.text for answer in answers]
    with ThreadPoolExecutor() as threads:
        woken = list(threads.map(lambda _: call(server, "/wake_up"), range(4)))
    assert {answer.status_code for answer in woken} == {200}
    assert ask(server).status_code == 200


def test_a_worker_that_dies_asleep_is_replaced_by_one_that_sleeps(server: Server) -> None:
    with asleep(server, 1):
        (before,) = workers(server)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: workers(server) not in ([], [before]), "another worker is there")
        assert is_sleeping(server)
        assert ask(server).status_code == 503


def test_a_model_that_is_loaded_again_is_awake(server: Server) -> None:
    assert call(server, "/sleep", level=2).status_code == 200
    assert server.http.post("/models/model/reload").status_code == 200
    assert not is_sleeping(server)
    assert ask(server).status_code == 200


@pytest.mark.parametrize(
    ("path", "parameters", "body", "said"),
    [
        ("/sleep", {"level": "3"}, None, "it takes 0, 1 or 2"),
        ("/sleep", {"level": "9" * 5000}, None, "it takes an integer"),
        ("/sleep", {"mode": "keep\n"}, None, "it takes wait or abort"),
        ("/wake_up", {"tags": "weights"}, None, "leave it out"),
        ("/sleep", {"model": "batches"}, None, "does not support the operation sleep"),
        ("/reset_prefix_cache", {"model": "batches"}, None, "does not support the operation reset_prefix_cache"),
        ("/reset_prefix_cache", {"reset_external": "perhaps"}, None, "it takes true or false"),
        ("/abort", {}, {"request_ids": "x"}, "request_ids"),
        ("/v1/load_lora_adapter", {}, {"lora_name": "a\nb", "lora_path": "elsewhere"}, "Parameter name"),
        ("/v1/load_lora_adapter", {}, {"lora_path": "elsewhere"}, "lora_name"),
        ("/v1/load_lora_adapter", {}, {"lora_name": "a", "lora_path": "e", "is_3d_lora_weight": True}, "is_3d_lora"),
        ("/v1/load_lora_adapter", {"model": "batches"}, {"lora_name": "a", "lora_path": "e"}, "LoRA is not enabled"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    server: Server, path: str, parameters: dict[str, str], body: Any, said: str
) -> None:
    answer = call(server, path, body, **parameters)
    assert answer.status_code == 400, answer.text
    assert said in answer.text
    assert server.http.get(path).status_code == 405
    assert not is_sleeping(server)


def test_several_models_must_be_told_apart(server: Server) -> None:
    answer = server.http.post("/sleep")
    assert answer.status_code == 400
    assert "name one in the parameter model" in answer.text


def test_adapters_come_and_go_by_vllms_calls(server: Server, tmp_path: Path) -> None:
    load = {"lora_name": "poet", "lora_path": str(tmp_path)}
    added = call(server, "/v1/load_lora_adapter", load)
    assert (added.status_code, added.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    again = call(server, "/v1/load_lora_adapter", load)
    assert again.status_code == 400
    assert "load_inplace=true replaces it" in again.text
    assert call(server, "/v1/load_lora_adapter", load | {"load_inplace": True}).status_code == 200
    assert "poet" in [adapter["name"] for adapter in server.http.get("/models/model/adapters").json()["adapters"]]
    answer = server.http.post("/v1/completions", json={"model": "poet", "prompt": "a", "max_tokens": 2})
    assert "poet:" in answer.text
    removed = call(server, "/v1/unload_lora_adapter", {"lora_name": "poet", "lora_int_id": 1})
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert call(server, "/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 404


def test_the_prefix_cache_is_reset(server: Server) -> None:
    assert call(server, "/reset_prefix_cache").json() == {"success": True}


def test_a_request_wakes_a_model_if_a_setting_says_so(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", minWorkers=1, maxWorkers=1)
    with running(model, variables={"SERVING_WAKE_ON_REQUEST": "true"}, workers=1) as server:
        for level in (1, 2):
            assert server.http.post("/sleep", params={"level": level}).status_code == 200
            with ThreadPoolExecutor() as threads:
                answers = list(threads.map(lambda _: server.invoke("a b"), range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4
            assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_requests_that_wait_for_a_model_to_wake_up_are_bounded_and_have_deadlines(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", minWorkers=1, maxWorkers=1, job_queue_size=2)
    with running(model, variables={"SERVING_WAKE_ON_REQUEST": "true"}, workers=1) as server:
        assert server.http.post("/sleep", params={"level": 2}).status_code == 200
        late = server.http.post("/invocations", json=request("a", 2), headers={"x-request-timeout": "0.001"})
        assert (late.status_code, "waited for model model to wake up" in late.text) == (504, True), late.text
        wait_until(lambda: not server.http.get("/is_sleeping").json()["is_sleeping"], "it woke the model")
        assert server.http.post("/sleep", params={"level": 2}).status_code == 200
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda _: server.invoke("a b"), range(12)))
        assert {answer.status_code for answer in answers} == {200, 503}
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert "job_queue_size=2 requests wait for model model to wake up" in refused.text
        assert "retry-after" in refused.headers


def test_who_may_not_manage_models_may_not_make_them_sleep(tmp_path: Path) -> None:
    with running(make_model(tmp_path / "model"), variables={"SERVING_MANAGEMENT_API_KEYS": "secret"}) as server:
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/abort", "/v1/load_lora_adapter"):
            assert server.http.post(path, content=json.dumps({})).status_code == 401, path
        assert server.http.get("/is_sleeping").status_code == 401
        assert server.http.get("/is_sleeping", headers={"authorization": "Bearer secret"}).status_code == 200


# --- the parts ---


class FakeWorker:
    """Answers `commands` of these operations, and nothing to others."""

    name = "fake"

    def __init__(self, *operations: str) -> None:
        self.operations = operations
        self.killed = 0
        self.controls = self

    async def call(self, command: Command) -> bytes:
        if command.operation not in self.operations:
            await asyncio.Event().wait()
        return b""

    def kill(self) -> None:
        self.killed += 1


def fake_model(*workers: FakeWorker) -> Any:
    """Return a loaded model that has no request."""
    pool = FakePool()
    pool.roster = SimpleNamespace(ready=list(workers))
    pool.availability = SimpleNamespace(paused=None)
    pool.dispatcher = SimpleNamespace(queued=0, in_flight=0, abort=lambda error: 0)
    pool.settings = SimpleNamespace(job_queue_size=3)
    pool.replica_sets = []

    async def at_once() -> None:
        """Return: it is not being loaded again."""

    return FakeModel(label="fake", pool=pool, loaded=lambda: pool, until_reloaded=at_once, notes={})


class FakePool(SimpleNamespace):
    gate = None
    __hash__ = object.__hash__  # type: ignore[assignment]


class FakeModel(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


@on_loop
async def test_a_worker_that_does_not_fall_asleep_in_time_is_killed_and_the_model_stays_awake() -> None:
    good, hung = FakeWorker("sleep", "wake_up"), FakeWorker("wake_up")
    model, sleepers = fake_model(good, hung), Sleepers(1.0, True, 0.01)
    with pytest.raises(ModelNotReadyError, match=r"did not answer sleep within sleep_timeout=0\.01 seconds"):
        await sleepers.sleep(model, 1, "abort")
    assert (good.killed, hung.killed) == (0, 1)
    assert (sleepers.level(model), model.pool.gate, model.pool.availability.paused) == (None, None, None)


@on_loop
async def test_a_worker_that_does_not_wake_up_in_time_is_killed_and_the_model_is_awake() -> None:
    hung = FakeWorker("sleep")
    model, sleepers = fake_model(hung), Sleepers(1.0, True, 0.01)
    await sleepers.sleep(model, 1, "abort")
    await model.pool.gate.wait(None)
    assert hung.killed == 1
    assert sleepers.level(model) is None


@on_loop
async def test_a_gate_holds_back_no_more_than_its_capacity_and_each_place_is_freed() -> None:
    opened = asyncio.Event()

    async def until_open() -> None:
        await opened.wait()

    gate = Gate(until_open, 3, "for a test")
    waiting = [asyncio.create_task(gate.wait(None)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="job_queue_size=3 requests wait for a test"):
        await gate.wait(None)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    past = Deadline(time.monotonic() - 1, "x-request-timeout=1", ends_running=True)
    with pytest.raises(DeadlineError, match=r"waited for a test until its deadline \(x-request-timeout=1 seconds\)"):
        await gate.wait(past)
    assert gate.waiting == 2
    opened.set()
    await asyncio.gather(*waiting[1:])
    assert gate.waiting == 0


def test_a_time_out_of_its_own_is_no_deadline() -> None:
    async def fail() -> None:
        raise TimeoutError("of the disk")

    far = Deadline(time.monotonic() + 60, "x-request-timeout=60", ends_running=True)
    for deadline in (None, far):
        with pytest.raises(TimeoutError, match="of the disk"):
            asyncio.run(until_deadline(fail(), deadline, "waited"))
