"""Lists of files, and what one API key may have, without a server around the routes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from relay_helpers import on_loop
from starlette.requests import Request
from waiting import wait_until

from frontend.batches.asking import Asking
from frontend.batches.batches_api import BatchesApi
from frontend.batches.files_api import FilesApi
from frontend.batches.records import FILE_PREFIX, BatchRecord, FileRecord, OwnedRecords, content_key
from frontend.batches.run import RunParts
from frontend.batches.runner import BatchRunner
from frontend.batches.settings import BatchSettings
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.http.protocol import scope_without_client
from frontend.storage.objects import StoreThreads, open_store
from frontend.storage.owners import EVERYONE, new_id
from lmi_server.contract.errors import KeyBusyError, PayloadTooLargeError


class FakeRunner:
    """Runs nothing."""

    def wake(self) -> None:
        pass

    def running(self, batch_id: str) -> BatchRecord | None:
        return None


def records_of(directory: Path) -> OwnedRecords:
    return OwnedRecords(open_store(str(directory), "batches_store"))


def stored_file(records: OwnedRecords, purpose: str = "batch", expires_at: int | None = None) -> str:
    file_id = new_id(FILE_PREFIX)
    records.store.put(content_key(EVERYONE, file_id), b"0123456789")
    records.save_file(EVERYONE, FileRecord(file_id, 10, 0, "name", purpose, expires_at))
    return file_id


def request(body: bytes = b"", query: str = "") -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "GET", "headers": [], "query_string": query.encode()}, receive)


@on_loop
async def test_files_that_are_not_shown_take_no_place_on_a_page(tmp_path: Path) -> None:
    """A client takes an empty page for the last one."""
    records = records_of(tmp_path)
    files = [stored_file(records) for _ in range(3)]
    for number in range(5):
        stored_file(records, "batch_output", expires_at=1 if number % 2 else None)
    api = FilesApi(records, StoreThreads(2, "test"), BatchSettings())
    found: list[str] = []
    after, has_more = "", True
    while has_more:
        page = json.loads(bytes((await api.list(request(query=f"purpose=batch&limit=1&after={after}"))).body))
        found += [each["id"] for each in page["data"]]
        after, has_more = page["last_id"], page["has_more"]
    assert found == sorted(files, reverse=True)


def creation(file_id: str) -> Request:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return request(json.dumps(body).encode())


@on_loop
async def test_requests_at_the_same_time_begin_no_more_batches_than_a_key_may_have(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    file_id = stored_file(records)
    api = BatchesApi(records, StoreThreads(8, "test"), BatchSettings(batches_max_unfinished=3), FakeRunner())
    answers = await asyncio.gather(*(api.create(creation(file_id)) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(answer, KeyBusyError) for answer in answers) == 17
    assert len(records.unfinished_ids(EVERYONE)) == 3


@on_loop
async def test_a_key_whose_files_take_all_its_room_begins_no_batch_that_makes_more(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    file_id = stored_file(records)
    api = BatchesApi(records, StoreThreads(2, "test"), BatchSettings(batches_max_size=10), FakeRunner())
    with pytest.raises(PayloadTooLargeError, match="batches_max_size=10"):
        await api.create(creation(file_id))
    assert records.batch_ids(EVERYONE) == []


@on_loop
async def test_batches_that_have_ended_make_room_for_new_ones_and_no_other_does(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    file_id = stored_file(records)
    api = BatchesApi(records, StoreThreads(2, "test"), BatchSettings(batches_max_kept=4), FakeRunner())
    made = [json.loads(bytes((await api.create(creation(file_id))).body))["id"] for _ in range(3)]
    for batch_id in made[1:]:
        records.forget_unfinished(EVERYONE, batch_id)
    made += [json.loads(bytes((await api.create(creation(file_id))).body))["id"] for _ in range(4)]
    assert sorted(records.batch_ids(EVERYONE)) == sorted([made[0], *made[3:]]), "those that run are not forgotten"


@on_loop
async def test_what_cannot_be_read_hides_nothing_else_in_a_list(tmp_path: Path) -> None:
    records, threads = records_of(tmp_path), StoreThreads(2, "test")
    files = [stored_file(records) for _ in range(2)]
    batches = BatchesApi(records, threads, BatchSettings(), FakeRunner())
    made = [json.loads(bytes((await batches.create(creation(files[1]))).body))["id"] for _ in range(2)]
    (tmp_path / EVERYONE / "files" / files[0]).write_bytes(b"{")
    (tmp_path / EVERYONE / "batches" / made[0]).write_bytes(b"[]")
    for api, left in ((FilesApi(records, threads, BatchSettings()), files[1]), (batches, made[1])):
        assert [each["id"] for each in json.loads(bytes((await api.list(request())).body))["data"]] == [left]


def runner_of(records: OwnedRecords, settings: BatchSettings) -> BatchRunner:
    parts = RunParts(records, StoreThreads(1, "test"), cast(Asking, None), settings, 1 << 20)
    return BatchRunner(parts, None)


def test_what_cannot_be_read_or_removed_keeps_nothing_else_from_being_removed(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    expired = [stored_file(records, expires_at=1) for _ in range(3)]
    (tmp_path / EVERYONE / "files" / expired[0]).write_bytes(b"{")
    for name in ("no id", expired[1].replace("file-", "lost-")):
        (tmp_path / EVERYONE / "files" / name).write_bytes(b"not of this server")
    old = f"{FILE_PREFIX}{1:011x}{'0' * 20}"
    for owner in ("a" * 32, "b" * 32, "c" * 32):
        records.store.put(f"{owner}/files/{old}", b"{")
        records.store.put(content_key(owner, old), b"x")
    content = tmp_path / ("b" * 32) / "contents" / old
    content.unlink()
    content.mkdir()  # what cannot be removed
    abandoned = tmp_path / ".tmp" / "abandoned"
    abandoned.write_bytes(b"x")
    os.utime(abandoned, (1, 1))
    runner_of(records, BatchSettings())._sweep()
    left = sorted(path.name for path in (tmp_path / EVERYONE / "files").iterdir())
    assert left == sorted([expired[0], "no id", expired[1].replace("file-", "lost-")]), "it may be read again one day"
    assert (records.sizes("a" * 32), records.sizes("c" * 32)) == ([], [])
    assert not abandoned.exists()


FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n0123456789\r\n--b--\r\n'
)


def arriving(directory: Path) -> list[Path]:
    return list(directory.glob(".tmp/*"))


def upload(until: asyncio.Event, form: bytes = FORM) -> Request:
    """Return an upload whose last bytes arrive when `until` is set."""
    pieces = [form[:-8], form[-8:]]

    async def receive() -> dict[str, Any]:
        if len(pieces) == 1:
            await until.wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    held = HeldBytes(MemoryBudget(1 << 20, "full"))
    return Request({**scope_without_client("/v1/files", headers, None, held)}, receive)


@on_loop
async def test_uploads_at_the_same_time_do_not_take_the_same_room(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    api = FilesApi(records, StoreThreads(4, "test"), BatchSettings(batches_max_size=10))
    ends = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(api.create(upload(end))) for end in ends]
    await asyncio.to_thread(wait_until, lambda: len(arriving(tmp_path)) == 3, "all uploads have begun")
    ends[1].set()
    await tasks[1]
    for task, end in zip(tasks[::2], ends[::2], strict=True):
        end.set()
        with pytest.raises(PayloadTooLargeError, match="batches_max_size=10"):
            await task
    assert (records.sizes(EVERYONE), arriving(tmp_path)) == ([10], [])


@on_loop
async def test_what_arrives_counts_beside_what_is_stored(tmp_path: Path) -> None:
    """The content is written in two parts: the second one finds that another upload has taken the room."""
    records = records_of(tmp_path)
    records.store.put(content_key(EVERYONE, stored_file(records)), b"x" * 60_000)
    api = FilesApi(records, StoreThreads(4, "test"), BatchSettings(batches_max_size=400_000))
    form, end = FORM.replace(b"0123456789", b"x" * 350_000), asyncio.Event()
    waiting = asyncio.create_task(api.create(upload(end, form)))
    await asyncio.to_thread(wait_until, lambda: any(path.stat().st_size for path in arriving(tmp_path)), "it arrives")
    small, end_now = FORM.replace(b"0123456789", b"x" * 10_000), asyncio.Event()
    end_now.set()
    with pytest.raises(PayloadTooLargeError, match="uploads take batches_max_size=400000"):
        await api.create(upload(end_now, small))
    end.set()
    await waiting
    assert (records.sizes(EVERYONE), arriving(tmp_path)) == ([60_000, 350_000], [])


@on_loop
async def test_what_arrives_of_uploads_at_the_same_time_is_bounded(tmp_path: Path) -> None:
    records = records_of(tmp_path)
    api = FilesApi(records, StoreThreads(4, "test"), BatchSettings(batches_max_size=600_000))
    form = FORM.replace(b"0123456789", b"x" * 400_000)
    end = asyncio.Event()
    tasks = [asyncio.create_task(api.create(upload(end, form))) for _ in range(2)]
    (refused,), _ = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(PayloadTooLargeError, match="uploads take batches_max_size=600000"):
        await refused
    end.set()
    await asyncio.gather(*(task for task in tasks if task is not refused))
    await api.create(upload(end, form))  # what has ended counts no more
    assert (records.sizes(EVERYONE), arriving(tmp_path)) == ([400_000, 400_000], [])
