"""One batch, from the check of its input to its files.

    validating -> in_progress -> finalizing -> completed, or expired
        |             |
        |             +-> cancelling -> cancelled
        +-> failed

Whatever is done is stored before it is told. So a server that takes over after a sudden end reads the journal, asks for
the lines without an answer there, and writes the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from frontend.batches import records
from frontend.batches.answers import AnswerLog, KeptLine, kept_lines, write_answers
from frontend.batches.asking import Asking
from frontend.batches.input import BatchInput, take
from frontend.batches.records import BatchCounts, BatchRecord, LineFault, OwnedRecords, content_key
from frontend.batches.settings import BatchSettings
from frontend.storage.objects import Journal, StoreThreads
from lmi_server.batches.lines import BatchLine, LineError, error_line
from lmi_server.files.journal import TakenError

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between looks at the time and for a cancellation
_SAVED_S = 5.0  # between records of the progress


@dataclass(frozen=True, slots=True)
class RunParts:
    """What all batches of a server share. `longest` is how many bytes a line may have."""

    records: OwnedRecords
    threads: StoreThreads
    asking: Asking
    settings: BatchSettings
    longest: int


class BatchRun:
    """Runs one batch of an owner, whose requests count as the `tenant`'s. It owns `journal`."""

    def __init__(self, parts: RunParts, owner: str, tenant: bytes, record: BatchRecord, journal: Journal) -> None:
        self.record = record
        self._parts = parts
        self._owner = owner
        self._tenant = tenant
        self._journal = journal
        self._done = bytearray()  # a one for each line with an answer
        self._log = AnswerLog(journal, parts.threads, self._count)
        self._asked: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # raises what a line met with
        self._slots = asyncio.Semaphore(parts.settings.batches_concurrency)
        self._look = asyncio.Event()
        store = parts.records.store
        self._input = BatchInput(store, content_key(owner, record.input_file_id), parts.longest, record.endpoint)

    def look(self) -> None:
        """Look soon whether the batch is cancelled."""
        self._look.set()

    async def run(self) -> None:
        """Run the batch to its end. It goes on another time if this is cancelled, or if the store fails."""
        try:
            await self._run()
        except TakenError as error:
            logger.warning("batch %s is run by another server: %s", self.record.id, error)
        except FileNotFoundError:
            await self._fail("input_file_gone", "the input file was deleted or has expired")
        except LineError as error:
            await self._fail(error.code, error.message)
        except OSError as error:
            logger.error("batch %s waits, because the store fails: %s", self.record.id, error)
        finally:
            self._log.abandon()
            await self._parts.threads.run(self._journal.close)

    async def _run(self) -> None:
        if self.record.status == records.VALIDATING and not await self._check():
            return
        await self._read_journal()
        ending = await self._answer_all()
        counts = self.record.counts
        if ending == records.COMPLETED and counts.completed + counts.failed != counts.total:
            raise OSError(f"{counts.total} lines have {counts.completed + counts.failed} answers")
        if ending == records.EXPIRED:
            await self._expire_rest()
        await self._finish(ending)

    # --- the input ---

    async def _check(self) -> bool:
        """Check the input; return whether it can be used. The batch has failed otherwise."""
        record, parts = self.record, self._parts
        lines, requests, faults = await parts.threads.run(self._input.check, parts.settings.batches_max_requests)
        if faults:
            record.fail(faults)
            await parts.threads.run(parts.records.end_batch, self._owner, record)
            return False
        record.lines = lines
        record.counts = BatchCounts(total=requests)
        record.enter(records.IN_PROGRESS)
        await self._save()
        return True

    async def _fail(self, code: str, message: str) -> None:
        """End the batch early; what is answered is in its files."""
        with contextlib.suppress(OSError):  # the next try finds out again
            await self._parts.threads.run(self._write_files)
            self.record.fail([LineFault(code, message)])
            await self._parts.threads.run(self._parts.records.end_batch, self._owner, self.record)

    async def _read_journal(self) -> None:
        """Find the lines with an answer from before."""
        self._done = bytearray(self.record.lines + 1)
        self.record.counts = BatchCounts(total=self.record.counts.total)
        for line in await self._parts.threads.run(self._kept_numbers):
            self._count(line)

    def _kept_numbers(self) -> list[KeptLine]:
        return [kept._replace(line=b"") for kept in kept_lines(self._journal)]

    def _count(self, line: KeptLine) -> None:
        if self._done[line.number]:
            return
        self._done[line.number] = 1
        counts = self.record.counts
        counts.completed += line.is_answered
        counts.failed += not line.is_answered

    # --- the answers ---

    async def _answer_all(self) -> str:
        """Answer the lines without an answer; return the status to which this leads."""
        feeding = asyncio.create_task(self._feed())
        watching = asyncio.create_task(self._until_over())
        try:
            first: set[asyncio.Future[str]] = {feeding, watching, self._broken}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                return self._broken.result()
            return feeding.result() if feeding.done() else watching.result()
        except asyncio.CancelledError:
            self._log.end()
            raise
        finally:
            tasks = [feeding, watching, *self._asked]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._log.flush()

    async def _feed(self) -> str:
        """Ask for each line, some at a time."""
        lines = self._input.lines()
        while taken := await self._parts.threads.run(take, lines):
            for line in taken:
                if not self._done[line.number]:
                    await self._begin(line)
        while self._asked:
            await asyncio.wait(self._asked)
        return records.COMPLETED

    async def _begin(self, line: BatchLine) -> None:
        await self._slots.acquire()
        held = await self._parts.asking.hold(len(line.body))
        task = asyncio.create_task(self._answer(line))
        self._asked.add(task)

        def end(ended: asyncio.Task[None]) -> None:
            held.release()
            self._slots.release()
            self._asked.discard(ended)
            if not ended.cancelled() and (error := ended.exception()) is not None and not self._broken.done():
                self._broken.set_exception(error)

        task.add_done_callback(end)

    async def _answer(self, line: BatchLine) -> None:
        outcome = await self._parts.asking.answer(line, self._line_id(line), self._tenant)
        await self._log.add(KeptLine(line.number, outcome.is_answered, outcome.line))

    def _line_id(self, line: BatchLine) -> str:
        return f"batch_req_{self.record.id.removeprefix(records.BATCH_PREFIX)}_{line.number}"

    async def _until_over(self) -> str:
        """Return once the batch is cancelled or has expired; record its progress until then."""
        parts, saved = self._parts, time.monotonic()
        while True:
            if await parts.threads.run(parts.records.cancellations.includes, self._owner, self.record.id):
                self.record.enter(records.CANCELLING)
                return records.CANCELLED
            left_s = self.record.expires_at - time.time()
            if left_s <= 0:
                return records.EXPIRED
            await parts.threads.run(self._journal.keep)
            if time.monotonic() - saved >= _SAVED_S:
                await self._save()
                saved = time.monotonic()
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), min(_LOOK_S, left_s))

    async def _expire_rest(self) -> None:
        """Note for each line without an answer that its time is over."""
        message = "This request could not be executed before the completion window expired."
        lines = self._input.lines()
        while taken := await self._parts.threads.run(take, lines):
            rest = [line for line in taken if not self._done[line.number]]
            texts = [error_line(self._line_id(line), line.custom_id, "batch_expired", message) for line in rest]
            added = [self._log.add(KeptLine(line.number, False, text)) for line, text in zip(rest, texts, strict=True)]
            await asyncio.gather(*added)  # written at once
            await self._parts.threads.run(self._journal.keep)

    # --- the end ---

    async def _finish(self, status: str) -> None:
        """Write the files, then the record that names them."""
        record, threads = self.record, self._parts.threads
        record.enter(records.FINALIZING if status == records.COMPLETED else record.status)
        await self._save()
        await threads.run(self._write_files)
        record.enter(status)
        await threads.run(self._parts.records.end_batch, self._owner, record)

    async def _save(self) -> None:
        await self._parts.threads.run(self._parts.records.save_batch, self._owner, self.record)

    def _write_files(self) -> None:
        parts, record = self._parts, self.record
        lifetime_s = record.output_lifetime_s or int(parts.settings.batches_lifetime)
        write_answers(parts.records, self._owner, record, self._journal, lifetime_s)
