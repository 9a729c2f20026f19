"""How many workers code of users gets on the CPU: none before the first request, more under load, LMI's defaults."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from own_code_helpers import make_own
from server_helpers import Server, running
from waiting import wait_until

# Answers after `seconds` with the number of its process.
SLOW = """
import os, time
from djl_python import Output
def handle(inputs):
    if inputs.is_empty():
        return None
    time.sleep(float(inputs.get_as_string()))
    return Output().add(str(os.getpid()))
"""
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lazy": {"minWorkers": 0, "maxWorkers": 1},
    "one": {"minWorkers": 1, "maxWorkers": 1},
    "split": {"tensor_parallel_degree": 4},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    for name, options in MODELS.items():
        make_own(store / name, SLOW, **options)
    make_own(store / "broken", "def handle(inputs):\n    raise ValueError('no weights')", minWorkers=0)
    with running("--model-store", store) as server:
        wait_until(lambda: server.http.get("/ping").status_code == 200, "every model is ready")
        yield server


def group(server: Server, model: str) -> dict[str, Any]:
    (element,) = server.http.get(f"/models/{model}").json()
    (found,) = element["models"][0]["workerGroups"]
    return dict(found)


def test_no_worker_runs_before_the_first_request(server: Server) -> None:
    cpu = {"deviceType": "cpu", "deviceId": -1}
    assert group(server, "lazy") == {"device": cpu, "minWorkers": 0, "maxWorkers": 1, "workers": []}
    assert server.http.get("/ping").json()["lazy"] == {"status": "Healthy"}
    first, second = (server.http.post("/predictions/lazy", content="0") for _ in range(2))
    assert (first.status_code, first.text) == (200, second.text)
    assert len(group(server, "lazy")["workers"]) == 1


def test_more_workers_start_under_load_only(server: Server) -> None:
    assert len({server.http.post("/predictions/plain", content="0").text for _ in range(4)}) == 1
    assert group(server, "plain")["maxWorkers"] == 2  # OMP_NUM_THREADS is not set
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda _: server.http.post("/predictions/plain", content="0.5").text, range(6)))
    assert len(set(answers)) == 2


def test_as_many_workers_as_the_configuration_says(server: Server) -> None:
    found = group(server, "one")
    assert (found["minWorkers"], found["maxWorkers"]) == (1, 1)


def test_a_degree_without_a_gpu_is_a_warning(server: Server) -> None:
    assert server.http.post("/predictions/split", content="0").status_code == 200
    server.log_line(r' WARNING .*tensor_parallel_degree = "4" gives no GPU to a worker, because none is visible')


def test_a_first_request_whose_worker_cannot_load_says_why(server: Server) -> None:
    """The last test, because the model fails for good."""
    response = server.http.post("/predictions/broken", content="0")
    assert (response.status_code, "no weights" in response.json()["message"]) == (503, True)
    found = group(server, "broken")
    assert (found["minWorkers"], found["maxWorkers"], found["workers"]) == (0, 2, []), "the bounds stay, as in LMI"
    assert server.http.get("/ping").status_code == 500
