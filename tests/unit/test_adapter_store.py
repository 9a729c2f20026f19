"""Adapters that are loaded when requests ask for them: order, room, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from relay_helpers import on_loop

from lmi_server.artifacts.fetch import artifact_settings
from lmi_server.contract.errors import DeadlineError, ModelNotFoundError, ModelNotReadyError, QueueFullError
from lmi_server.contract.protocol import ADAPTER_HEADER, AddAdapter, Command, Input, RemoveAdapter
from lmi_server.serving.adapters.adapter_store import AdapterStore, fetch_from_store, hold_in_time
from lmi_server.serving.adapters.adapters import Adapters
from lmi_server.supervisor.job import Deadline


class Worker:
    """A worker that records which adapters it has."""

    name = "worker"

    def __init__(self) -> None:
        self.has: list[str] = []
        self.controls = SimpleNamespace(call=self._call)

    async def _call(self, command: Command) -> bytes:
        await asyncio.sleep(0)
        match command:
            case AddAdapter(adapter):
                self.has.append(adapter.name)
            case RemoveAdapter(name):
                self.has.remove(name)
        return b""


class Store:
    """An AdapterStore for two adapters, before a worker; `fetch` returns once `arrived` is set."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.worker = Worker()
        self.arrived = asyncio.Event()
        self.arrived.set()
        self.adapters = Adapters([], lambda: [self.worker], 60.0)  # type: ignore[list-item]
        self.store = AdapterStore(self.adapters, self._fetch, self._until_ready, 2, max_waiting)

    async def _fetch(self, name: str) -> str:
        await self.arrived.wait()
        if name == "missing":
            raise ModelNotFoundError("there is none")
        return f"/stored/{name}"

    async def _until_ready(self) -> None: ...

    async def used(self, *names: str) -> None:
        for name in names:
            await self.store.hold(asking(name))
            self.store.release(asking(name))


def asking(name: str) -> Input:
    return Input("", {ADAPTER_HEADER: name}, [], "id")


@on_loop
async def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    store = Store()
    await store.used("a", "b", "a", "c")
    assert store.worker.has == ["a", "c"]


@on_loop
async def test_one_that_is_held_stays_and_others_wait_for_its_end() -> None:
    store = Store()
    await store.store.hold(asking("a"))
    await store.used("b", "c", "d")
    assert store.worker.has == ["a", "d"]
    await store.store.hold(asking("d"))
    waiting = asyncio.create_task(store.used("e"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    store.store.release(asking("a"))
    await waiting
    assert store.worker.has == ["d", "e"]


@on_loop
async def test_a_request_waits_for_room_until_its_deadline_alone() -> None:
    store = Store()
    await store.store.hold(asking("a"))
    await store.store.hold(asking("b"))
    deadline = Deadline(time.monotonic() + 0.01, "0.01", ends_running=False)
    with pytest.raises(DeadlineError, match=r"waited for its adapter until its deadline \(0\.01 seconds\)"):
        await hold_in_time(store.store, asking("c"), deadline)
    await hold_in_time(store.store, asking("a"), deadline)  # it is there
    store.store.release(asking("b"))
    await store.used("c")
    assert store.worker.has == ["a", "c"]


@on_loop
async def test_one_that_is_missing_costs_no_place() -> None:
    store = Store()
    await store.used("a", "b")
    with pytest.raises(ModelNotFoundError):
        await store.used("missing")
    assert store.worker.has == ["a", "b"]


@on_loop
async def test_who_waits_when_the_workers_end_is_told_so() -> None:
    """It is not the client that has left: the front end sends the request to the workers that take their place."""

    store = Store()
    store.arrived.clear()
    waiting = asyncio.create_task(store.used("a"))
    await asyncio.sleep(0.01)
    store.store.stop()
    with pytest.raises(ModelNotReadyError):
        await waiting


@on_loop
async def test_a_client_that_leaves_does_not_stop_the_load_for_others() -> None:
    store = Store(max_waiting=2)
    store.arrived.clear()
    leaving, staying = asyncio.create_task(store.used("a")), asyncio.create_task(store.used("a"))
    await asyncio.sleep(0.01)
    with pytest.raises(QueueFullError):
        await store.used("b")
    leaving.cancel()
    store.arrived.set()
    await staying
    assert store.worker.has == ["a"]


@on_loop
async def test_one_that_a_call_has_removed_is_loaded_again() -> None:
    store = Store()
    await store.used("a")
    await store.adapters.remove("a")
    await store.used("a", "b")
    assert store.worker.has == ["a", "b"]


@pytest.mark.parametrize("name", ["..", "../a", "a/b", "", ".hidden", "a\n", "other"])
def test_a_name_never_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "store" / "a").mkdir(parents=True)
    settings = artifact_settings(str(tmp_path), {})
    assert asyncio.run(fetch_from_store("store", "a", str(tmp_path), settings)) == str(tmp_path / "store" / "a")
    with pytest.raises(ModelNotFoundError):
        asyncio.run(fetch_from_store("store", name, str(tmp_path), settings))
