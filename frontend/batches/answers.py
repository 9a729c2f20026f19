"""The answers of one batch, as its journal keeps them: one a line, behind the number of the line that it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from frontend.batches.records import BatchRecord, FileRecord, OwnedRecords, content_key
from frontend.storage.objects import Journal, StoreThreads
from lmi_server.batches.lines import split_lines
from lmi_server.files.journal import TakenError

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 62
_RETRY_S = 5.0  # while the store takes nothing, as on a full disk
_ANSWERED, _FAILED = b"o", b"e"


class KeptLine(NamedTuple):
    """One line of the output, or of the errors."""

    number: int
    is_answered: bool
    line: bytes

    def encode(self) -> bytes:
        return b"%d %b %b\n" % (self.number, _ANSWERED if self.is_answered else _FAILED, self.line)


def kept_lines(journal: Journal) -> Iterator[KeptLine]:
    """Yield what a journal has. Raises OSError."""
    for record in split_lines(journal.blocks(), _NO_LIMIT):
        number, kind, line = (record or b"").split(b" ", 2)
        yield KeptLine(int(number), kind == _ANSWERED, line)


class AnswerLog:
    """Appends answers to a journal, all that have come in the meantime at once. `on_kept` gets each that is durable."""

    def __init__(self, journal: Journal, threads: StoreThreads, on_kept: Callable[[KeptLine], None]) -> None:
        self._journal = journal
        self._threads = threads
        self._on_kept = on_kept
        self._waiting: list[tuple[KeptLine, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()

    async def add(self, line: KeptLine) -> None:
        """Return once the line is durable. Raises OSError if that is given up: another server has taken it over."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((line, kept))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await kept

    def end(self) -> None:
        """Wait no more for a store that takes nothing; what is not durable is answered again."""
        self._ends.set()

    async def flush(self) -> None:
        """Wait until everything is durable, or is given up."""
        if self._writing is not None:
            await self._writing

    def abandon(self) -> None:
        """Write nothing more; what is not durable is answered again."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting, []
                await self._write(b"".join(line.encode() for line, _ in taken))
                for line, kept in taken:
                    self._on_kept(line)
                    if not kept.done():  # else its task is cancelled
                        kept.set_result(None)
        except OSError as error:
            for _, kept in (*taken, *self._waiting):
                if not kept.done():
                    kept.set_exception(error)
        finally:
            self._writing = None

    async def _write(self, data: bytes) -> None:
        while True:
            try:
                await self._threads.run(self._journal.append, data)
                return
            except TakenError:
                raise
            except OSError as error:
                if self._ends.is_set():
                    raise
                logger.error("answers of a batch cannot be stored, and wait: %s", error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ends.wait(), _RETRY_S)


def write_answers(records: OwnedRecords, owner: str, record: BatchRecord, journal: Journal, lifetime_s: int) -> None:
    """Write the files of a batch, each line of the journal once, and note in `record` which there are.

    Each is there as a whole or not at all. Raises OSError.
    """
    files = (record.output_id, record.error_id)
    needed = (record.counts.completed, record.counts.failed)
    with contextlib.ExitStack() as opened:
        writers = [
            opened.enter_context(records.store.writer(content_key(owner, file_id))) if count else None
            for file_id, count in zip(files, needed, strict=True)
        ]
        sizes = _copy_lines(journal, record.lines, writers)
    now = int(time.time())
    for file_id, size, kind in zip(files, sizes, ("output", "errors"), strict=True):
        if size:
            name = f"{record.id}_{kind}.jsonl"
            records.save_file(owner, FileRecord(file_id, size, now, name, "batch_output", now + lifetime_s))
    record.has_output, record.has_errors = (size > 0 for size in sizes)


def _copy_lines(journal: Journal, lines: int, writers: Sequence[BinaryIO | None]) -> list[int]:
    """Write each line to the first writer, or to the second if it is an error; return the bytes of both."""
    written = bytearray(lines + 1)
    sizes = [0, 0]
    for kept in kept_lines(journal):
        if not written[kept.number]:
            written[kept.number] = 1
            file = writers[not kept.is_answered]
            assert file is not None, "the counts are those of the journal"
            sizes[not kept.is_answered] += file.write(kept.line + b"\n")
    return sizes
