"""Runs the batches of a store: its own, and the batches of servers that have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from frontend.access.api_keys import KeyRing
from frontend.batches.records import BatchRecord, journal_key
from frontend.batches.run import BatchRun, RunParts
from frontend.storage.objects import Journal
from frontend.storage.owners import created_at, tenants
from lmi_server.files.journal import TakenError

logger = logging.getLogger(__name__)

_LOOK_S = 10.0  # between looks for what others have left
_SWEEP_S = 3600.0
_OF_ONE_OWNER = 4  # batches that run at a time
_OF_ALL = 16
_BEGUN_S = 600.0  # within which a batch that has a mark gets its record, unless its server ended in between


class BatchRunner:
    """Runs the oldest batches of each owner, a few at a time. `keys` are those of the server, None without."""

    def __init__(self, parts: RunParts, keys: KeyRing | None) -> None:
        self._parts = parts
        self._keys = keys
        self._runs: dict[str, BatchRun] = {}  # by id
        self._tasks: dict[asyncio.Task[None], tuple[str, str]] = {}  # owner and id
        self._wake = asyncio.Event()
        self._ends = False
        self._keyless: set[str] = set()

    def wake(self) -> None:
        """Look for batches to run, or to cancel."""
        self._wake.set()
        for run in self._runs.values():
            run.look()

    def running(self, batch_id: str) -> BatchRecord | None:
        """Return the record of a batch that runs here, as it is now."""
        run = self._runs.get(batch_id)
        return None if run is None else run.record

    async def serve(self) -> None:
        """Run batches until this is cancelled."""
        swept = 0.0
        while True:
            self._wake.clear()
            try:
                await self._begin_all()
                if time.monotonic() - swept > _SWEEP_S:
                    swept = time.monotonic()
                    await self._parts.threads.run(self._sweep)
            except OSError as error:
                logger.error("batches wait, because their store cannot be read: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)

    def drain(self) -> None:
        """Stop: lines without an answer are asked for again at the next start."""
        self._ends = True
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """Wait until what is answered is stored."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the choice ---

    async def _begin_all(self) -> None:
        records, threads = self._parts.records, self._parts.threads
        by_owner = tenants(self._keys)
        for owner in await threads.run(records.owners):
            tenant = by_owner.get(owner)
            waiting = [each for each in await threads.run(records.unfinished_ids, owner) if each not in self._runs]
            if tenant is None:
                self._note_keyless(owner, waiting)
                continue
            cancelled = set(await threads.run(records.cancellations.ids, owner)) if waiting else set()
            for batch_id in sorted(waiting, key=lambda each: (each not in cancelled, each)):
                if batch_id not in cancelled and not self._has_room(owner):
                    break
                await self._begin(owner, tenant, batch_id)

    def _has_room(self, owner: str) -> bool:
        own = sum(other == owner for other, _ in self._tasks.values())
        return own < _OF_ONE_OWNER and len(self._tasks) < _OF_ALL

    def _note_keyless(self, owner: str, waiting: list[str]) -> None:
        for batch_id in set(waiting) - self._keyless:
            logger.warning("batch %s waits: its API key is not one of this server any more", batch_id)
            self._keyless.add(batch_id)

    async def _begin(self, owner: str, tenant: bytes, batch_id: str) -> None:
        try:
            journal = await self._parts.threads.run(self._parts.records.store.journal, journal_key(owner, batch_id))
            record = await self._parts.threads.run(self._take_up, owner, batch_id, journal)
        except TakenError:
            return
        except OSError as error:  # the others do not wait for this one
            logger.error("batch %s waits, because the store fails: %s", batch_id, error)
            return
        if record is None:
            return
        run = BatchRun(self._parts, owner, tenant, record, journal)
        self._runs[batch_id] = run
        task = asyncio.create_task(run.run())
        self._tasks[task] = (owner, batch_id)
        task.add_done_callback(self._on_task_end)
        if self._ends:
            task.cancel()

    def _take_up(self, owner: str, batch_id: str, journal: Journal) -> BatchRecord | None:
        """Return the record as its last server has left it; None, and close the journal, if there is nothing to do."""
        try:
            record = self._parts.records.batch(owner, batch_id)
        except OSError:
            journal.close()
            raise
        if record is not None and not record.has_ended:
            return record
        journal.close()
        if record is None and created_at(batch_id) > time.time() - _BEGUN_S:
            return None
        self._parts.records.forget_unfinished(owner, batch_id)
        return None

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        _, batch_id = self._tasks.pop(task)
        run = self._runs.pop(batch_id)
        if not task.cancelled() and task.exception() is not None:
            logger.error("batch %s waits for another try", batch_id, exc_info=task.exception())
        elif run.record.has_ended:
            self._wake.set()

    # --- the end of what is kept ---

    def _sweep(self) -> None:
        """Remove files that have expired, and batches that have ended long ago."""
        records = self._parts.records
        _attempt(records.store.remove_abandoned)
        for owner in records.owners():
            _attempt(self._sweep_owner, owner)

    def _sweep_owner(self, owner: str) -> None:
        records = self._parts.records
        oldest = time.time() - self._parts.settings.batches_lifetime
        for file_id in records.file_ids(owner):
            _attempt(records.remove_if_expired, owner, file_id, oldest)
        cancelled = set(records.cancellations.ids(owner))  # before `unfinished`: each had its mark there at this time
        unfinished = set(records.unfinished_ids(owner))
        if not unfinished:  # else its files may be about to get their records
            _attempt(records.remove_orphans, owner)
        for batch_id in cancelled - unfinished:  # which came when the batch had just ended
            _attempt(records.cancellations.remove, owner, batch_id)
        for batch_id in records.batch_ids(owner):
            if batch_id not in unfinished and created_at(batch_id) < oldest:
                _attempt(records.remove_batch, owner, batch_id)


def _attempt(remove: Callable[..., object], *arguments: object) -> None:
    """Call a function of the store: one that fails keeps no other from being called."""
    try:
        remove(*arguments)
    except OSError as error:
        logger.error("what has expired cannot be removed (%s): %s", "/".join(map(str, arguments[:2])), error)
