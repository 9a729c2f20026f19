"""The log of the server process: written to standard error by a thread of its own.

A write to a pipe blocks while the pipe is full. On the event loop such a write would stop every request as soon as the
reader of the log (a container runtime, a terminal, `| less`) falls behind. So the event loop only puts records into a
queue. The queue is bounded, because a reader may never come back. Records that do not fit are dropped and counted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import select
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from lmi_server.artifacts.progress import TERMINAL
from lmi_server.contract.texts import log_fields
from lmi_server.contract.texts.quoting import LONGEST_RECORD, NOT_FOR_TERMINALS, as_record, shorten
from lmi_server.contract.texts.secrets import SECRETS

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_CAPACITY = 16 << 20  # bytes: a hundred thousand lines of the usual length
_RECORD_BYTES = 512  # of a record beside its text, roughly
_CLOSE_LIMIT_S = 1.0
_LOOKS = 10  # at a log that is being closed, in this time
_CLOSE_LIMITS = 15  # of these times, for a reader that goes on
_KEPT_LINES = 500
_LONGEST_KEPT = 4096  # characters
# Bytes, a page of a pipe: a blocking write returns when a reader has taken all of it, and the end of the log waits as
# long as some do. Larger pieces save a millisecond of a megabyte.
_PIECE = 4 << 10
_LINE_END = ord("\n")
_DELETE = b"\x7f"  # the one control character that JSON leaves as it is and that is ASCII


class WrittenLines(logging.LogRecord):
    """Lines in UTF-8, each with its line end, which go into the log without a level or a logger in front of them."""

    def __init__(self, name: str, *parts: bytes) -> None:
        self.parts = parts  # of several lines each
        super().__init__(name, logging.INFO, __file__, 0, "", None, None)

    @property
    def count(self) -> int:
        return sum(part.count(b"\n") for part in self.parts)

    def getMessage(self) -> str:  # noqa: N802 - the name is that of logging
        return b"".join(self.mask()).decode().removesuffix("\n")

    def mask(self) -> list[bytes]:
        """Return the parts without secrets and control characters. This is for the thread that writes them."""
        return [_mask_lines(part) for part in self.parts]


def _mask_lines(lines: bytes) -> bytes:
    if lines.isascii() and _DELETE not in lines and not SECRETS.may_be_in(lines):
        return lines
    # Line by line: other threads wait for the interpreter while one text is searched.
    texts = lines.decode().splitlines(keepends=True)
    return "".join([SECRETS.mask(text).translate(NOT_FOR_TERMINALS) for text in texts]).encode()


def _mask_message(message: str) -> str:
    """Return the message of a record without secrets, cut if it is longer than any line of a worker."""
    return SECRETS.mask(shorten(message, LONGEST_RECORD))


class JsonFormatter(logging.Formatter):
    """Writes each record as an object in JSON on one line, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record, WrittenLines):
            return record.getMessage()
        entry: dict[str, Any] = {
            "log": "server",
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **_fields(record),
        }
        entry["message"] = _mask_message(entry.pop("message"))  # last in the line
        return json.dumps(entry)  # in ASCII, so that no character means anything to a terminal


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the text and the fields of a record. The worker, which is a field, is cut from the front of the text."""
    fields = log_fields.of_record(record)
    message = record.getMessage().removeprefix(f"[{fields.get('worker', fields.get('model'))}] ")
    if record.exc_info:  # the queue has put it into the message of other records
        message += f"\n{logging.Formatter().formatException(record.exc_info)}"
    return {"message": message, **fields}


class LineFormatter(logging.Formatter):
    """Hides secrets, escapes control characters and indents further lines, so that no text can forge a record."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if isinstance(record, WrittenLines) else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is that of logging
        record.message = as_record(_mask_message(record.message))
        return super().formatMessage(record)


def formatter(name: str) -> logging.Formatter:
    """Return the formatter of a value of `log_format`."""
    return JsonFormatter() if name == "json" else LineFormatter(LOG_FORMAT)


class LogTail:
    """The last lines that were written, for the console. One thread adds and another reads."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_LINES)
        self._added = 0

    def add(self, text: bytes, count: int = 1) -> None:
        """Keep what was written: a record of the log, or `count` lines."""
        for line in text.removesuffix(b"\n").split(b"\n") if count > 1 else (text,):
            self._added += 1
            self._lines.append((self._added, line))

    def since(self, number: int) -> list[tuple[int, str]]:
        """Return the kept lines after this number (0: all), each with its own number."""
        lines = [(at, line) for at, line in self._lines.copy() if at > number]
        return [(at, line.decode(errors="replace").removesuffix("\n")[:_LONGEST_KEPT]) for at, line in lines]


@contextlib.contextmanager
def background_log(fd: int, log_format: str) -> Iterator[BackgroundLog]:
    """Let the root logger write to the file descriptor `fd` in the background."""
    tail = LogTail()
    target = _DescriptorHandler(fd, tail)
    target.setFormatter(formatter(log_format))
    log = BackgroundLog(logging.getLogger(), target)
    log.tail = tail
    log.start()
    try:
        yield log
    finally:
        log.close()


class BackgroundLog:
    """Writes the records of `logger` to a file descriptor or with a handler, in a thread, from `start` to `close`.

    At most `capacity` bytes of records wait. `tail` has the last lines of the server's own log.
    """

    def __init__(self, logger: logging.Logger, target: int | logging.Handler, capacity: int = _CAPACITY) -> None:
        self.tail = LogTail()
        self._logger = logger
        self._handler = _DroppingHandler(_RecordQueue(capacity))
        self._listener = _Listener(self._handler, _DescriptorHandler(target) if isinstance(target, int) else target)
        self._replaced: list[logging.Handler] = []

    def start(self) -> None:
        """Take the place of the logger's handlers."""
        self._replaced, self._logger.handlers = self._logger.handlers, [self._handler]
        self._listener.start()

    def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        """Write what waits, while a reader takes a part in `limit_s` seconds; put the logger's handlers back."""
        if self._logger.handlers == [self._handler]:
            self._logger.handlers = self._replaced
            self._listener.end(limit_s)


class _RecordQueue(queue.Queue[logging.LogRecord | None]):
    """A queue that is bounded by the memory of its records; None is the end."""

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self._bytes = 0

    def put_end(self) -> None:
        """Put the end behind the records, however full the queue is."""
        with self.mutex:
            self._put(None)
            self.unfinished_tasks += 1
            self.not_empty.notify()

    def _qsize(self) -> int:
        return self._bytes

    def _put(self, item: logging.LogRecord | None) -> None:
        self._bytes += _size(item)
        super()._put(item)

    def _get(self) -> logging.LogRecord | None:
        item = super()._get()
        self._bytes -= _size(item)
        return item


def _size(record: logging.LogRecord | None) -> int:
    if isinstance(record, WrittenLines):
        return _RECORD_BYTES + sum(map(len, record.parts))
    return _RECORD_BYTES + (0 if record is None else len(record.msg))


class _DroppingHandler(QueueHandler):
    """Puts records into the queue; counts records that do not fit."""

    queue: _RecordQueue

    def __init__(self, records: _RecordQueue) -> None:
        super().__init__(records)
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Make the text here, except for lines that are complete."""
        return record if isinstance(record, WrittenLines) else super().prepare(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        # After a drop the queue must be half empty before it takes records again. A slow reader then gets whole
        # passages and not single lines between reports of what is missing.
        if self._dropped and self.queue.qsize() > self.queue.maxsize // 2:
            self._dropped += _lines(record)
            return
        try:
            report = self._take_report()
            if report is not None:
                self.queue.put_nowait(report)
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += _lines(record)

    def take_report(self) -> logging.LogRecord | None:
        """Return a record that says how many were dropped since the last report, None if none were."""
        with self.lock or contextlib.nullcontext():
            return self._take_report()

    def _take_report(self) -> logging.LogRecord | None:
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return None
        text = f"{dropped} lines were not logged, because the log is read too slowly"
        return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


def _lines(record: logging.LogRecord) -> int:
    return record.count if isinstance(record, WrittenLines) else 1


class _Listener(QueueListener):
    """Takes records out of the queue in a daemon thread, so that a blocked write does not keep the process alive."""

    def __init__(self, source: _DroppingHandler, target: logging.Handler) -> None:
        super().__init__(source.queue, target)
        self._records = source.queue
        self._source = source
        self._target = target
        self._handled = 0

    def handle(self, record: logging.LogRecord) -> None:
        super().handle(record)
        self._handled += 1
        # Nothing but the end is left: the next record, which would bring the report, may come much later.
        if self._records.qsize() <= _size(None):
            report = self._source.take_report()
            if report is not None:
                super().handle(report)

    def end(self, limit_s: float) -> None:
        """Write what waits, while some of it is written every `limit_s` seconds, and for at most 15 times as long.

        A long record counts by its bytes, where the target counts them. The limit is counted in looks, so that records
        are not lost where this process itself was stopped for a time.
        """
        thread = self._thread
        if thread is None:
            return
        self._records.put_end()
        looks = idle = 0
        while thread.is_alive() and idle < _LOOKS and looks < _CLOSE_LIMITS * _LOOKS:
            progress = self._progress
            thread.join(limit_s / _LOOKS)
            looks, idle = looks + 1, idle + 1 if progress == self._progress else 0

    @property
    def _progress(self) -> tuple[int, int]:
        """Return the records and the bytes that were written."""
        target = self._target
        return self._handled, target.written if isinstance(target, _DescriptorHandler) else 0


class _DescriptorHandler(logging.Handler):
    """Writes to a file descriptor.

    It neither locks nor uses `sys.stderr`. The interpreter flushes both when it ends: if the writing thread held a lock
    in a blocked write, that would never return.
    """

    def __init__(self, fd: int, tail: LogTail | None = None) -> None:
        super().__init__()
        self.written = 0  # bytes
        self._is_within_line = False
        self._lost = 0  # lines
        self._fd = fd
        self._is_terminal = os.isatty(fd)
        self._tail = tail
        self.setFormatter(LineFormatter(LOG_FORMAT))

    def createLock(self) -> None:  # noqa: N802 - the name is that of logging
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record. From Python 3.13 on, the method of logging fails without a lock."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record, WrittenLines):
            texts = record.mask()
        else:
            texts = [f"{self.format(record)}\n".encode(errors="backslashreplace")]
        if self._tail is not None:
            for text in texts:
                self._tail.add(text, text.count(b"\n") if isinstance(record, WrittenLines) else 1)
        if self._lost and not self._write([self._report()]):
            self._lost = 0
        self._lost += self._write(texts)

    def _report(self) -> bytes:
        """Return the line that says how many were lost, on a line of its own also behind a part of one."""
        text = f"{self._lost} lines of the log were lost, because they could not be written"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        return b"%b%b\n" % (b"\n" if self._is_within_line else b"", self.format(record).encode())

    def _write(self, texts: Sequence[bytes]) -> int:
        """Write lines; return how many are lost, because the disk is full or the reader of the log is gone."""
        if self._is_terminal:
            texts = [TERMINAL.around_lines(text) for text in texts]
        pieces = itertools.chain.from_iterable(map(_pieces, texts))
        for piece in pieces:
            while piece:
                try:
                    written = os.write(self._fd, piece)
                except BlockingIOError:  # another process that shares the pipe has made it non-blocking
                    select.select((), (self._fd,), ())
                    continue
                except OSError:
                    return sum(bytes(lost).count(b"\n") for lost in (piece, *pieces))
                self.written += written
                self._is_within_line = piece[written - 1] != _LINE_END
                piece = piece[written:]
        return 0


def _pieces(text: bytes) -> Iterator[memoryview]:
    """Yield the parts of a text in which it is written: whole lines, as far as these are short."""
    view, start = memoryview(text), 0
    while len(text) - start > _PIECE:
        end = text.rfind(b"\n", start, start + _PIECE) + 1 or start + _PIECE
        yield view[start:end]
        start = end
    yield view[start:]
