"""The list of models: those that can answer, in the forms of OpenAI and Anthropic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from server_helpers import FAULTS, Server, make_model, running
from waiting import wait_until

ANTHROPIC = {"anthropic-version": "2023-06-01"}
BEGAN = int(time.time())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of models: three can answer, one of them without a worker; one fails, and one never loads."""
    directory = tmp_path_factory.mktemp("models")
    make_model(directory / "first", FAULTS, served_model_name="alias", enable_lora="true")
    (directory / "first" / "adapters" / "own").mkdir(parents=True)
    make_model(directory / "asleep", FAULTS, minWorkers=0, maxWorkers=1)
    make_model(directory / "second", FAULTS)
    make_model(directory / "failing", "fault_handlers:FailingHandler")
    make_model(directory / "loading", "fault_handlers:GatedHandler")
    return directory


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running("--model-store", store) as server:
        ready = {"asleep", "first", "second"}
        wait_until(lambda: ready == statuses(server)["Healthy"], "those that can answer do")
        wait_until(lambda: statuses(server)["FAILED"] == {"failing"}, "one has failed")
        yield server


def statuses(server: Server) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"Healthy": set(), "FAILED": set(), "PENDING": set()}
    for name, model in server.http.get("/ping").json().items():
        found[model["status"]].add(name)
    return found


def test_the_list_has_what_can_answer(server: Server) -> None:
    entries = server.http.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in entries] == ["asleep", "first", "alias", "second", "own"]
    assert statuses(server)["PENDING"] == {"loading"}
    assert all(BEGAN - 1 <= entry["created"] <= time.time() for entry in entries)


def test_an_adapter_has_the_time_of_its_own_registration(server: Server, store: Path) -> None:
    model = server.http.get("/v1/models/first").json()["created"]
    wait_until(lambda: int(time.time()) > model, "the clock has moved")
    assert server.http.post("/models/first/adapters", params={"name": "late", "src": str(store)}).status_code == 200
    assert server.http.get("/v1/models/late").json()["created"] > model
    assert server.http.delete("/models/first/adapters/late").status_code == 200


def test_anthropic_s_form(server: Server) -> None:
    page = server.http.get("/v1/models", headers=ANTHROPIC).json()
    assert page.keys() == {"data", "has_more", "first_id", "last_id"}
    assert [entry["id"] for entry in page["data"]] == ["asleep", "first", "alias", "second", "own"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "asleep", "own")
    entry = page["data"][1]
    created = datetime.fromisoformat(entry.pop("created_at"))
    assert created.timestamp() >= BEGAN - 1
    assert entry == {"type": "model", "id": "first", "display_name": "first"}
    assert server.http.get("/v1/models/first", headers=ANTHROPIC).json() == page["data"][1] | {
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ")
    }


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ("limit=2", ["asleep", "first"], True),
        ("limit=2&after_id=first", ["alias", "second"], True),
        ("limit=2&after_id=second", ["own"], False),
        ("limit=2&before_id=own", ["alias", "second"], True),
        ("before_id=asleep", [], False),
    ],
)
def test_the_pages_of_anthropic_s_form(server: Server, query: str, names: list[str], more: bool) -> None:
    page = server.http.get(f"/v1/models?{query}", headers=ANTHROPIC).json()
    assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (names, more)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after_id=nobody", f"limit={'9' * 5000}"])
def test_pages_that_there_cannot_be(server: Server, query: str) -> None:
    reply = server.http.get(f"/v1/models?{query}", headers=ANTHROPIC)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert len(reply.content) < 1000


def test_anthropic_s_error_for_a_name_that_no_model_has(server: Server) -> None:
    reply = server.http.get("/v1/models/nobody", headers=ANTHROPIC)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.slow
def test_anthropic_s_client_reads_all_pages(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic", reason="it is in the extra clients")
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list(limit=2)] == ["asleep", "first", "alias", "second", "own"]
        assert client.models.retrieve("own").display_name == "own"
