"""The runner of batches, and one batch, over a directory and without a model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

from relay_helpers import on_loop

from frontend.batches.asking import Asking, Outcome
from frontend.batches.records import BATCH_PREFIX, BatchRecord, OwnedRecords, content_key, new_batch
from frontend.batches.run import RunParts
from frontend.batches.runner import BatchRunner
from frontend.batches.settings import BatchSettings
from frontend.http.held_bytes import HeldBytes, MemoryBudget
from frontend.storage.objects import open_store
from frontend.storage.owners import EVERYONE, new_id
from frontend.storage.threads import StoreThreads
from lmi_server.batches.lines import BatchLine

COMPLETIONS = "/v1/completions"
INPUT = "file-" + "0" * 31


class FakeAsking:
    """Answers each line at once; with `is_silent` none at all."""

    def __init__(self, is_silent: bool = False) -> None:
        self._is_silent = is_silent

    async def hold(self, size: int) -> HeldBytes:
        return HeldBytes(MemoryBudget(1 << 30, "full"))

    async def answer(self, line: BatchLine, line_id: str, tenant: bytes) -> Outcome:
        if self._is_silent:
            await asyncio.Event().wait()
        return Outcome(b"{}", True)


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
