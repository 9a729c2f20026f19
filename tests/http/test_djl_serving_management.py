"""A sequence of management calls is answered as DJL Serving answered it.

tests/data/djl_serving/management.jsonl has the calls in order, each with the answer: as JSON, with 0 for each worker's
id and TIME for its start. {home} is the directory that holds the models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from own_code_helpers import make_own
from paths import DATA
from server_helpers import Server, running
from waiting import wait_until

RECORDING = DATA / "djl_serving" / "management.jsonl"
ECHO = """
from djl_python import Output
def handle(inputs):
    return None if inputs.is_empty() else Output().add(inputs.get_as_bytes())
"""
ADAPTERS = f"""{ECHO}
def register_adapter(inputs):
    return Output(message=f"Adapter {{inputs.get_property('name')}} registered")
def update_adapter(inputs):
    return Output(message=f"Adapter {{inputs.get_property('name')}} updated")
def unregister_adapter(inputs):
    return Output(message=f"Adapter {{inputs.get_property('name')}} unregistered")
"""
_NUMBER = "a number that is none is a mistake of the client, 400"
_NULL = "a body that lacks a parameter or is no JSON object is a mistake of the client, 400"
_TOKEN = "only a page that is followed by another has a token; a client that reads to the end would never stop"
_NAMED = "a registration in JSON may leave the name out, as one in the query may"
# What differs on purpose: the number of the call, and why.
DIFFERENT = {
    3: _TOKEN,
    63: _TOKEN,
    17: _NUMBER,
    20: _NUMBER,
    92: _NUMBER,
    38: "a scheme that is not served is a URL without a model, 404",
    39: "there can be no bucket called b, 404",
    41: "a URL of blanks is no URL, 400",
    83: _NAMED,
    84: _NAMED,
    85: _NAMED,
    93: _NULL,
    94: _NULL,
    95: _NULL,
    96: _NULL,
    97: _NULL,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    for name in ("models/echo", "extra/echo2"):
        make_own(directory / name, ECHO)
    make_own(directory / "models" / "adaptecho", ADAPTERS, enable_lora="true")
    return directory


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    with running("--model-store", home / "models", variables={"OMP_NUM_THREADS": "1"}) as server:
        wait_until(lambda: server.http.get("/health/ready").status_code == 200, "both models are ready")
        yield server


def calls(home: Path) -> Iterator[dict[str, Any]]:
    for line in RECORDING.read_text().splitlines():
        yield json.loads(line.replace("{home}", str(home)))


def answer(server: Server, call: dict[str, Any]) -> httpx.Response:
    body = call.get("body")
    return server.http.request(call["method"], call["path"], content=body, headers=call.get("headers"))


def compared(status: int, answer: Any) -> Any:
    """Return what is to be the same: of an error its code and type, of a description all but what each run changes."""
    if isinstance(answer, list):
        return [described(element) for element in answer]
    return {"code": answer["code"], "type": answer["type"]} if status >= 400 and answer else answer


def described(element: dict[str, Any]) -> dict[str, Any]:
    """Return a description without the workers' ids, further fields, and the workers that are about to go."""
    for group in (group for model in element["models"] for group in model["workerGroups"]):
        group["workers"] = [worker["status"] for worker in group["workers"] if worker["status"] == "READY"]
    return element


@pytest.mark.slow
def test_the_calls_are_answered_as_recorded(server: Server, home: Path) -> None:
    different = {}
    for number, call in enumerate(calls(home), 1):
        response = answer(server, call)
        given = response.json() if response.text.startswith(("{", "[")) else response.text
        expected = (call["status"], call["content_type"], compared(call["status"], call["answer"]))
        found = (response.status_code, response.headers.get("content-type"), compared(response.status_code, given))
        if found != expected:
            different[number] = (call["method"], call["path"], expected, found)
    assert {number: different[number] for number in different if number not in DIFFERENT} == {}
    assert DIFFERENT.keys() <= different.keys()
