"""A model that is loaded again beside itself: by a call, by `lmi-server reload`, and when its configuration changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_servers import run_command
from own_code_helpers import make_own, serving_own
from server_helpers import Server, make_model, running
from waiting import wait_until

# Streams five pieces with the greeting that the configuration had when the worker loaded it. A file "go" beside the
# model ends the pauses of a request that says "slow"; "broken" as greeting does not load.
CODE = """
import os, time
from djl_python import Output

greeting = None

def handle(inputs):
    global greeting
    properties = inputs.get_properties()
    if greeting is None:
        greeting = properties["greeting"]
        if greeting == "broken":
            raise ValueError("no greeting")
    if inputs.is_empty():
        return None
    slow = inputs.get_as_string() == "slow"
    output = Output().add_property("content-type", "text/plain")
    output.add_stream_content(pieces(slow, os.path.join(properties["model_dir"], "go")), output_formatter=str)
    return output

def pieces(slow, go):
    for number in range(5):
        while slow and number == 2 and not os.path.exists(go):
            time.sleep(0.01)
        yield f"{greeting} "
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_own(directory / "model", CODE, greeting="one")
    make_model(directory / "echo", enable_lora="true", served_model_name="before", minWorkers=1, maxWorkers=1)
    return directory


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store, libraries="worker", workers=2) as server:
        yield server


def configure(model: Path, **options: Any) -> None:
    """Change keys of a serving.properties, as an editor that writes another file in its place."""
    path = model / "serving.properties"
    keys = dict(line.split("=", 1) for line in path.read_text().splitlines())
    keys |= {f"option.{name}": str(value) for name, value in options.items()}
    path.with_suffix(".new").write_text("\n".join(f"{key}={value}" for key, value in keys.items()))
    path.with_suffix(".new").rename(path)


def say(server: Server, body: str = "") -> str:
    answer = server.http.post("/predictions/model", content=body.encode())
    assert answer.status_code == 200, answer.text
    return answer.text


def reload(server: Server, model: str, **parameters: Any) -> httpx.Response:
    return server.http.post(f"/models/{model}/reload", params=parameters)


def workers(server: Server) -> dict[int, int]:
    """Return the process of each worker by its number."""
    (group,) = server.described()["workerGroups"]
    return {worker["id"]: worker["pid"] for worker in group["workers"]}


@contextmanager
def asking(server: Server, threads: int) -> Iterator[list[tuple[int, str]]]:
    """Send requests without a pause meanwhile, yield their answers."""
    answers: list[tuple[int, str]] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=60) as client:
            while not over.is_set():
                answer = client.post("/predictions/model", content=b"fast")
                answers.append((answer.status_code, answer.text))

    with ThreadPoolExecutor(threads) as pool:
        asked = [pool.submit(ask) for _ in range(threads)]
        try:
            yield answers
        finally:
            over.set()
        for each in asked:
            each.result()


def begin_slow(server: Server) -> tuple[Future[str], threading.Event]:
    """Begin a request whose stream waits for the file "go"; the event is set once its first bytes are there."""
    begun = threading.Event()

    def read() -> str:
        parts = []
        with httpx.stream("POST", f"{server.http.base_url}/predictions/model", content=b"slow", timeout=60) as answer:
            for part in answer.iter_text():
                parts.append(part)
                begun.set()
        return "".join(parts)

    pool = ThreadPoolExecutor(1)
    result = pool.submit(read)
    pool.shutdown(wait=False)
    return result, begun


@pytest.mark.slow
def test_every_request_ends_well_while_the_model_is_replaced(tmp_path: Path) -> None:
    with serving_own(tmp_path, CODE, workers=2, greeting="one") as server:
        model = tmp_path / "model"
        old = workers(server)
        stream, begun = begin_slow(server)
        assert begun.wait(60)
        configure(model, greeting="two")
        with asking(server, 4) as answers:
            wait_until(lambda: answers, "requests are answered")
            answer = reload(server, "model")
            assert (answer.status_code, answer.json()) == (200, {"status": 'Model "model" reloaded.'})
            switched = len(answers)
            wait_until(lambda: len(answers) > switched + 8, "requests are answered by the new workers")
        assert {status for status, _ in answers} == {200}
        assert {text for _, text in answers} <= {"one " * 5, "two " * 5}
        assert answers[-1][1] == "two " * 5
        assert say(server) == "two " * 5
        assert not stream.done(), "a stream that runs goes on where it is"
        assert any(Path(f"/proc/{pid}").exists() for pid in old.values())
        (model / "go").touch()
        assert stream.result() == "one " * 5
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in old.values()), "the old workers have ended")
        assert server.metric("lmi_model_reloads_total") == 1
        assert (set(old), set(workers(server))) == ({1, 2}, {3, 4}), "no two workers of the log have one name"


def test_a_version_that_does_not_load_leaves_the_model_as_it_was(server: Server, store: Path) -> None:
    model = store / "model"
    configure(model, greeting="broken")
    environment = dict(os.environ)
    url = f"http://127.0.0.1:{server.port}"
    failed = run_command("reload", "model", "--url", url, env=environment, cwd=store)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.count("\n") == 1
    assert "no greeting" in failed.stderr
    found = server.described()
    assert (found["status"], found["reload"]["status"]) == ("Healthy", "FAILED")
    assert "no greeting" in found["reload"]["reason"]
    assert say(server) == "one " * 5
    configure(model, greeting="one")
    done = run_command("reload", "model", "--url", url, env=environment, cwd=store)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model: loaded again in ")
    assert server.described()["reload"]["status"] == "DONE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "Model or workflow not found: nobody"),
        ([], "has several models, name one: echo, model"),
        (["model", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer: "),
        (["model", "--url", "ftp://127.0.0.1"], "is no URL of a server"),
    ],
)
def test_what_the_command_cannot_do_is_said_in_one_line(
    server: Server, tmp_path: Path, arguments: list[str], message: str
) -> None:
    url = [] if "--url" in arguments else ["--url", f"http://127.0.0.1:{server.port}"]
    found = run_command("reload", *arguments, *url, env=dict(os.environ), cwd=tmp_path)
    assert found.returncode == 1
    assert message in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_configuration_that_is_wrong_is_refused_before_anything_is_loaded(server: Server, store: Path) -> None:
    configure(store / "echo", max_rolling_batch_size="many")
    answer = reload(server, "echo")
    assert answer.status_code == 400
    assert 'option.max_rolling_batch_size = "many" is not allowed' in answer.json()["message"]
    configure(store / "echo", max_rolling_batch_size="2")
    assert reload(server, "echo").status_code == 200


def test_what_calls_have_changed_survives(server: Server, store: Path, tmp_path: Path) -> None:
    """Adapters, numbers of workers; names follow the configuration."""
    adapter = tmp_path / "mine"
    adapter.mkdir()
    assert server.http.post("/models/echo/adapters", params={"name": "mine", "src": str(adapter)}).status_code == 200
    assert server.http.put("/models/echo", params={"min_worker": 2, "max_worker": 3}).status_code == 200
    configure(store / "echo", served_model_name="after")
    assert reload(server, "echo").status_code == 200
    names = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
    assert names == ["echo", "after", "model", "mine"]
    (group,) = server.described("echo")["workerGroups"]
    assert (group["minWorkers"], group["maxWorkers"], len(group["workers"])) == (2, 3, 2)
    answer = server.http.post("/predictions/echo", json={"inputs": "a", "adapters": "mine"})
    assert answer.status_code == 200, answer.text
    configure(store / "echo", enable_lora="false")
    answer = reload(server, "echo")
    assert answer.status_code == 400
    assert "adapters are registered: mine; unregister them first" in answer.json()["message"]
    assert server.http.delete("/models/echo/adapters/mine").status_code == 200
    assert reload(server, "echo").status_code == 200
    configure(store / "echo", enable_lora="true")
    assert reload(server, "echo").status_code == 200


@pytest.mark.slow
def test_a_model_that_has_failed_is_loaded_again(server: Server, tmp_path: Path) -> None:
    model = make_own(tmp_path / "late", CODE, greeting="broken")
    parameters = {"url": str(model), "synchronous": "false"}
    assert server.http.post("/models", params=parameters).status_code == 202
    wait_until(lambda: server.described("late")["status"] == "FAILED", "the model has failed")
    answer = reload(server, "late")
    assert answer.status_code >= 400
    assert server.described("late")["status"] == "FAILED"
    configure(model, greeting="three")
    answer = reload(server, "late", synchronous="false")
    assert (answer.status_code, answer.json()) == (202, {"status": 'Model "late" reload scheduled.'})
    wait_until(lambda: server.described("late")["status"] == "Healthy", "the model serves")
    assert server.http.post("/predictions/late", content=b"x").text == "three " * 5
    assert server.http.delete("/models/late").status_code == 200


@pytest.mark.slow
def test_a_changed_file_is_loaded_and_a_broken_one_is_not(tmp_path: Path) -> None:
    model = make_own(tmp_path / "model", CODE, greeting="one")
    with running(model, libraries="worker", variables={"SERVING_RELOAD_ON_CHANGE": "true"}, workers=1) as server:
        assert say(server) == "one " * 5
        configure(model, greeting="two")
        wait_until(lambda: say(server) == "two " * 5, "the changed configuration is served")
        configure(model, entryPoint="nowhere.py")
        wait_until(lambda: server.described()["reload"]["status"] == "FAILED", "the broken file was read")
        assert say(server) == "two " * 5
        (model / "serving.properties").write_text("option.greeting=three")
        wait_until(lambda: say(server) == "three " * 5, "the mended file is served")
        wait_until(lambda: server.described()["reload"]["status"] == "DONE", "and nothing else is loaded")
