"""Responses in the background whose end and whose cancellation meet."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from relay_helpers import on_loop
from starlette.requests import Request

from frontend.http.clients import Target
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.http.protocol import connection_of, scope_without_client
from frontend.storage.objects import StoreThreads, open_store
from frontend.storage.owners import EVERYONE, new_id
from frontend.stored_responses.api import ResponsesApi
from frontend.stored_responses.background import BackgroundResponses, in_progress
from frontend.stored_responses.records import PREFIX, ResponseStore, StoredResponse
from frontend.stored_responses.settings import ResponseSettings
from lmi_server.dialects.routes import RESPONSES
from lmi_server.supervisor.job import ReplySlot


class SlowStore(ResponseStore):
    """Keeps the completed response only once `go` is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(open_store(str(directory), "responses_store"), ResponseSettings())
        self.saves, self.go = threading.Event(), threading.Event()

    def save(self, owner: str, record: StoredResponse) -> None:
        if record.response["status"] == "completed":
            self.saves.set()
            assert self.go.wait(5)
        super().save(owner, record)


async def answer(target: Target, scope: Any, receive: Any, send: Any) -> None:
    connection_of(scope).watch(lambda: None, ReplySlot())
    await asyncio.sleep(0.05)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    body = b'{"object": "response", "status": "completed", "output": []}'
    await send({"type": "http.response.body", "body": body, "more_body": False})
    connection_of(scope).unwatch()


@pytest.mark.parametrize("call", ["cancel", "delete"])
@on_loop
async def test_what_a_client_is_told_of_an_end_stays_true(call: str, tmp_path: Path) -> None:
    store, threads = SlowStore(tmp_path), StoreThreads(4, "test")
    background = BackgroundResponses(answer, store, threads, 10)
    record = StoredResponse(in_progress(new_id(PREFIX), None, None), process=background.process)
    scope = scope_without_client("/v1/responses", [], None, HeldBytes(MemoryBudget(1 << 20, "full")))
    await background.start(EVERYONE, record, (RESPONSES, None, None), scope, receive)
    await asyncio.to_thread(store.saves.wait, 5)
    api = ResponsesApi(store, threads, background)
    path = {"type": "http", "headers": [], "path_params": {"response_id": record.id}}
    asked = asyncio.create_task(getattr(api, call)(Request(path)))
    await asyncio.sleep(0.1)
    store.go.set()
    told = (await asked).body
    await background.finish()
    found = store.load(EVERYONE, record.id)
    if call == "delete":
        assert found is None
    else:
        assert found is not None
        assert json.loads(told)["status"] == found.response["status"] == "completed"


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"{}", "more_body": False}


def test_a_status_that_is_no_text_is_no_status_of_a_running_response() -> None:
    response = {"id": "resp_1", "status": ["in_progress"]}  # as a server behind a router may send it
    assert not StoredResponse(response).is_running
