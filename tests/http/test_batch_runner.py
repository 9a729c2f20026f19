"""The runner of batches, and one batch, over a directory and without a model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from relay_helpers import on_loop

from frontend.access.api_keys import TENANT, KeyRing
from frontend.batches import asking as asking_module
from frontend.batches import pace as pace_module
from frontend.batches.asking import Asking, LineOutcome
from frontend.batches.pace import LinePace
from frontend.batches.records import (
    BATCH_PREFIX,
    BatchRecord,
    OwnedRecords,
    content_key,
    journal_key,
    new_batch,
)
from frontend.batches.run import BatchRun, RunParts
from frontend.batches.runner import BatchRunner
from frontend.batches.settings import BatchSettings
from frontend.http.clients import Target
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.http.protocol import connection_of
from frontend.storage import owners as owners_module
from frontend.storage.objects import Journal, StoreThreads, open_store
from frontend.storage.owners import EVERYONE, new_id, owner_of
from lmi_server.batches.lines import BatchLine
from lmi_server.contract.protocol import Error, Head
from lmi_server.supervisor.job import ReplySlot

COMPLETIONS = "/v1/completions"
INPUT = "file-" + "0" * 31


class FakeAsking:
    """Answers each line at once; with `is_silent` none at all."""

    def __init__(self, is_silent: bool = False) -> None:
        self._is_silent = is_silent

    async def hold(self, size: int) -> HeldBytes:
        return HeldBytes(MemoryBudget(1 << 30, "full"))

    async def answer(self, line: BatchLine, line_id: str, tenant: bytes) -> LineOutcome:
        if self._is_silent:
            await asyncio.Event().wait()
        return LineOutcome(b"{}", True)


def parts_of(directory: Path, asking: FakeAsking) -> RunParts:
    records = OwnedRecords(open_store(str(directory), "batches_store"))
    return RunParts(records, StoreThreads(4, "test"), cast("Asking", asking), BatchSettings(), 1 << 20)


def begun(records: OwnedRecords, lines: int, window_s: int = 3600, owner: str = EVERYONE) -> BatchRecord:
    """Store an input and a batch of it."""
    line = '{"custom_id": "%d", "url": "/v1/completions", "body": {}}\n'
    records.store.put(content_key(owner, INPUT), "".join(line % number for number in range(lines)).encode())
    record = new_batch(COMPLETIONS, INPUT, "1h", window_s)
    records.begin_batch(owner, record)
    return record


async def until_ended(records: OwnedRecords, record: BatchRecord, owner: str = EVERYONE) -> BatchRecord:
    while True:
        found = records.batch(owner, record.id)
        if found is not None and found.has_ended:
            return found
        await asyncio.sleep(0.01)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_loop
async def test_a_batch_that_cannot_be_read_keeps_no_other_one_waiting_and_no_file_open(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, FakeAsking())
    broken = new_id(BATCH_PREFIX)
    parts.records.store.put(f"{EVERYONE}/batches/{broken}", b"{")
    parts.records.store.put(f"{EVERYONE}/unfinished/{broken}", b"{}")
    record = begun(parts.records, 3)
    runner: Any = BatchRunner(parts, None)
    await runner._begin_all()
    done = await until_ended(parts.records, record)
    assert (done.status, done.counts.completed) == ("completed", 3)
    await runner.finish()
    before = open_files()
    for _ in range(5):
        await runner._begin_all()
    assert open_files() == before


class SuddenEndError(BaseException):
    """Stands for kill -9 in a test."""


@on_loop
async def test_a_sudden_end_while_a_batch_begins_leaves_no_batch_that_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tmp_path, FakeAsking())
    records, runner = parts.records, cast("Any", BatchRunner(parts, None))
    put = records.store.put
    written: list[str] = []

    def put_once(key: str, data: bytes) -> None:
        if written:
            raise SuddenEndError
        written.append(key)
        put(key, data)

    monkeypatch.setattr(records.store, "put", put_once)
    record = new_batch(COMPLETIONS, INPUT, "1h", 3600)
    with pytest.raises(SuddenEndError):
        records.begin_batch(EVERYONE, record)
    monkeypatch.undo()
    assert records.batch_ids(EVERYONE) == []
    long_ago = f"{BATCH_PREFIX}{1:011x}{'0' * 20}"
    records.store.put(f"{EVERYONE}/unfinished/{long_ago}", b"{}")
    await runner._begin_all()
    assert records.unfinished_ids(EVERYONE) == [record.id], "another server may be about to store it"
    records.store.put(content_key(EVERYONE, INPUT), b"")
    records.save_batch(EVERYONE, record)  # it was
    await runner._begin_all()
    assert (await until_ended(records, record)).status == "failed", "its input is empty"
    await runner.finish()
    assert records.unfinished_ids(EVERYONE) == []


@on_loop
async def test_many_keys_and_folders_of_others_cost_one_digest_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tmp_path, FakeAsking())
    digests = [bytes([number]) * 32 for number in range(20)]
    owners = [owner_of({TENANT: digest}) for digest in digests]
    batches = [begun(parts.records, 1, owner=owner) for owner in owners[:3]]
    for owner in owners[3:]:
        (tmp_path / owner).mkdir()
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "unfinished").write_text("which is no folder that can be read")
    hashed: list[bytes] = []
    folder = owners_module._folder
    monkeypatch.setattr(owners_module, "_folder", lambda digest: (hashed.append(digest), folder(digest))[1])
    runner: Any = BatchRunner(parts, cast("KeyRing", SimpleNamespace(digests=digests)))
    await runner._begin_all()
    runner._sweep()
    for owner, batch in zip(owners[:3], batches, strict=True):
        assert (await until_ended(parts.records, batch, owner)).status == "completed"
    assert hashed == digests


def test_nothing_is_left_of_a_cancellation_that_came_too_late(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, FakeAsking())
    records, runner = parts.records, BatchRunner(parts, None)
    ended, running = begun(records, 1), begun(records, 1)
    records.end_batch(EVERYONE, ended)
    for batch in (ended, running):
        records.cancellations.add(EVERYONE, batch.id)
    cast("Any", runner)._sweep()
    assert records.cancellations.ids(EVERYONE) == [running.id]


@on_loop
async def test_the_lines_of_an_expired_batch_are_written_some_at_a_time(tmp_path: Path) -> None:
    """Each write waits for the disk, or for S3: one for each line would take longer than the lease of a journal."""
    parts = parts_of(tmp_path, FakeAsking(is_silent=True))
    record = begun(parts.records, 1000, window_s=0)
    journal = CountingJournal(parts.records.store.journal(journal_key(EVERYONE, record.id)))
    await BatchRun(parts, EVERYONE, b"", record, cast("Journal", journal)).run()
    done = await until_ended(parts.records, record)
    assert (done.status, done.counts.failed, done.counts.total) == ("expired", 1000, 1000)
    assert journal.appends <= 1000 // 10
    assert journal.keeps >= journal.appends // 2


class CountingJournal:
    """Counts what a journal is asked."""

    def __init__(self, journal: Journal) -> None:
        self.appends = self.keeps = 0
        self._journal = journal
        self.blocks, self.close = journal.blocks, journal.close

    def append(self, data: bytes) -> None:
        self.appends += 1
        self._journal.append(data)

    def keep(self) -> None:
        self.keeps += 1


def chunk(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


@on_loop
async def test_an_answer_in_chunks_that_was_taken_back_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "_QUIET_S", (0.001, 0.001))
    dispatcher = SimpleNamespace(in_flight=0, queued=0)
    pool = SimpleNamespace(dispatcher=dispatcher, settings=SimpleNamespace(job_queue_size=100))
    model = type("FakeModel", (), {"pool": pool})()  # which has a hash
    models: Any = SimpleNamespace(only=SimpleNamespace(choose=lambda version: model))
    pace = LinePace(1, 0)
    tries: list[int] = []

    async def infer(target: Target, scope: Any, receive: Any, send: Any) -> None:
        tries.append(1)
        gone = asyncio.Event()
        connection_of(scope).watch(gone.set, ReplySlot())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(chunk(b'{"whole": ', more=True))
        if len(tries) == 1:
            pace.note_live()
            await gone.wait()
        await send(chunk(b"false" if gone.is_set() else b"true}", more=False))
        connection_of(scope).unwatch()

    line = BatchLine(1, "a", COMPLETIONS, b"{}")
    outcome = await Asking(infer, models, pace, "x-request-id").answer(line, "b", b"")
    assert (len(tries), outcome.is_answered) == (2, True)
    assert b'{"whole":true}' in outcome.line


@pytest.mark.parametrize(("kind", "tries"), [("UpstreamError", 1), ("WorkerDiedError", 3)])
@on_loop
async def test_a_part_of_an_answer_is_no_answer(kind: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "_PAUSE_S", 0.0)
    asked: list[int] = []

    async def infer(target: Target, scope: Any, receive: Any, send: Any) -> None:
        asked.append(1)
        reply = ReplySlot()
        connection_of(scope).watch(lambda: None, reply)
        reply.put(Head(1, 200, []), 0.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(chunk(b'{"whole": ', more=True))
        reply.put(Error(1, kind, "it ended in /srv/models/secret"), 0.0)
        await send(chunk(b"error", more=False))
        connection_of(scope).unwatch()

    models: Any = SimpleNamespace(only=None, default=None)
    line = BatchLine(1, "a", COMPLETIONS, b"{}")
    outcome = await Asking(infer, models, LinePace(1, 0), "x-request-id").answer(line, "b", b"")
    assert (len(asked), outcome.is_answered) == (tries, False)
    assert b"whole" not in outcome.line
    assert b"it ended" in outcome.line
