"""Copies what a worker writes to its standard output and error into the server's log, and reads metrics in it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable

from lmi_server.contract.metrics import MARK, MetricSink, drop_metric, parse_metric
from lmi_server.contract.texts.log_fields import WorkerLogger, of_worker
from lmi_server.supervisor.tracebacks import Tracebacks

logger = logging.getLogger(__name__)

_LONGEST_METRIC = 1024  # bytes of a line
_LONGEST_LINE = 64 * 1024
_BYTES_PER_S = 256 * 1024  # that one worker may log
_REPORT_AFTER_S = 1.0
_KEPT_LINES = 20
_OPEN_S = 0.2  # for which the next line of a traceback may take
_OF_LOGGER = re.compile(r"[A-Z]+ ([\w.]+): ")
_BURST = 4 * _BYTES_PER_S  # that it may log at once after a quiet time

LEVELS: dict[str, int] = {}
"""The levels of single loggers in workers, which write no line below them; the level of this process is for others."""


class WorkerLog:
    """Logs the lines of one worker under its name, and under the rank that `rank_of_line` finds in a line.

    A line in LMI's form, `[METRICS]Name.Unit:1|#Model:m|c`, goes to `on_metric` instead. The mark begins the line: what
    stands further behind may be quoted from a request.

    If a worker writes faster than `_BYTES_PER_S`, its output is still read, but dropped. So it neither fills the memory
    of this process nor takes its time from other models, and the worker itself does not block on a full pipe.

    `last_lines` are the newest ones.
    """

    def __init__(
        self,
        name: str,
        rank_of_line: Callable[[str], tuple[int | None, str]] = lambda line: (None, line),
        on_metric: MetricSink = drop_metric,
    ) -> None:
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._name = name
        self._on_metric = on_metric
        self._rank_of_line = rank_of_line
        self._allowed = float(_BURST)
        self._since = time.monotonic()
        self._dropped = 0  # bytes
        self._about = WorkerLogger(logger, name)

    async def forward(self, stream: asyncio.StreamReader) -> None:
        """Log the lines of `stream`, to its end."""
        rest = b""
        records = _Records(self._log)
        whole = True  # whether `rest` is the beginning of a line
        while data := await stream.read(_LONGEST_LINE):
            self._earn()
            if self._allowed <= 0:
                self._drop(len(rest) + len(data))
                rest, whole = b"", data.endswith(b"\n")
                await asyncio.sleep(0)  # a pipe that is always full must not keep the loop from other work
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._add(line, whole, records)
                whole = True
            if len(rest) > _LONGEST_LINE:
                self._add(rest, whole, records)
                rest, whole = b"", False
            records.settle()
        self._report_dropped()
        if rest:
            self._add(rest, whole, records)
        records.close()

    def _earn(self) -> None:
        now = time.monotonic()
        self._allowed = min(float(_BURST), self._allowed + (now - self._since) * _BYTES_PER_S)
        self._since = now
        if self._allowed > 0:
            self._report_dropped()

    def _drop(self, size: int) -> None:
        if not self._dropped:  # report soon, even if the worker writes nothing more
            asyncio.get_running_loop().call_later(_REPORT_AFTER_S, self._report_dropped)
        self._dropped += size

    def _report_dropped(self) -> None:
        if self._dropped:
            self._about.warning("writes too fast to be logged; %d bytes were dropped", self._dropped)
            self._dropped = 0

    def _add(self, line: bytes, whole: bool, records: _Records) -> None:
        """Add a line, or its further part if it is not `whole`, which begins neither a metric nor a record."""
        self._allowed -= len(line) + 64  # what a record costs beside its text
        rank, text = self._rank_of_line(line.decode(errors="replace").rstrip())
        if whole and text.startswith(MARK) and self._is_metric(text):
            return
        text = text.rpartition("\r")[2]  # as a terminal shows it: a progress bar writes over itself
        text = text if whole else f"  {text}"
        self.last_lines.append(text)
        records.add(rank, text)

    def _log(self, rank: int | None, text: str) -> None:
        name = self._name if rank is None else f"{self._name} rank {rank}"
        level, wanted = _level_of(text)
        if level >= (logger.getEffectiveLevel() if wanted is None else wanted):
            extra = of_worker(self._name, **_fields(rank, text))
            logger.handle(
                logger.makeRecord(logger.name, level, __file__, 0, "[%s] %s", (name, text), None, None, extra)
            )

    def _is_metric(self, line: str) -> bool:
        """Return whether a metric follows the mark at the beginning of the line, and report it."""
        metric = parse_metric(line.removeprefix(MARK)) if len(line) <= _LONGEST_METRIC else None
        if metric is None:
            return False
        self._on_metric(metric)
        return True


class _Records:
    """The records of one stream, by rank: each goes to `log` once it is complete, or nothing follows for a while."""

    def __init__(self, log: Callable[[int | None, str], None]) -> None:
        self._log = log
        self._by_rank: defaultdict[int | None, Tracebacks] = defaultdict(Tracebacks)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, rank: int | None, line: str) -> None:
        for record in self._by_rank[rank].add(line):
            self._log(rank, record)

    def settle(self) -> None:
        """Log the complete lines, but not tracebacks that may go on: they have a little time for that."""
        self._take({rank for rank, tracebacks in self._by_rank.items() if not tracebacks.is_open})
        if self._by_rank:
            self._timer = asyncio.get_running_loop().call_later(_OPEN_S, self.close)

    def close(self) -> None:
        """Log what is there."""
        self._take(set(self._by_rank))

    def _take(self, ranks: set[int | None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for rank in ranks:
            for record in self._by_rank.pop(rank).take():
                self._log(rank, record)


def _fields(rank: int | None, text: str) -> dict[str, str | int]:
    """Return the fields of a record: the rank, and the logger of a line that one wrote, whose text is the rest."""
    fields: dict[str, str | int] = {"message": text} if rank is None else {"message": text, "rank": rank}
    found = _OF_LOGGER.match(text)
    return fields if found is None else {**fields, "logger": found[1], "message": text[found.end() :]}


def _level_of(text: str) -> tuple[int, int | None]:
    """Return the level of a line, and the lowest one of its logger if that has one of its own.

    Lines of the worker's own loggers begin with level and name; all others count as INFO.
    """
    first, _, rest = text.partition(" ")
    level = logging.getLevelName(first)
    if not isinstance(level, int):
        return logging.INFO, None
    name = rest.partition(":")[0] if LEVELS else ""
    while name and name not in LEVELS:
        name = name.rpartition(".")[0]
    return level, LEVELS.get(name)
