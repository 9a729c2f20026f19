"""Progress of a fetch, or of a load, shown as bars on a terminal and as log lines elsewhere."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.progress import BYTES, Pace, Progress
from lmi_server.contract.texts.log_fields import of_model
from lmi_server.contract.texts.sizes import duration_in_words, in_words

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
_MAX_WORKS = 8
_BAR_WIDTH = 12  # columns of a terminal
_AMOUNT_WIDTH = 44
_T = TypeVar("_T")

OnProgress = Callable[[Progress], None]


class Activity:
    """Connects a fetch, which runs in a thread, with its caller: progress goes one way, cancellation the other."""

    def __init__(self, on_progress: OnProgress = lambda progress: None) -> None:
        self._on_progress = on_progress
        self._pace = Pace()
        self._cancelled = threading.Event()

    def report(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Report progress; of reports of the same work in quick succession, most go no further.

        Raises ArtifactError if the fetch was cancelled.
        """
        self.check()
        progress = self._pace.report(what, done, total)
        if progress is not None:
            self._on_progress(progress)

    def check(self) -> None:
        """Raise ArtifactError if the fetch was cancelled."""
        if self._cancelled.is_set():
            raise ArtifactError("the download was cancelled")

    def pause(self, seconds: float) -> None:
        """Sleep. Raises ArtifactError as soon as the fetch is cancelled."""
        self._cancelled.wait(seconds)
        self.check()

    def cancel(self) -> None:
        self._cancelled.set()


class LogProgress:
    """Logs a line when a piece of work begins and ends, and every five seconds in between.

    With `at_once` false, work that is shorter than that has no line.
    """

    def __init__(self, model_name: str, at_once: bool = True, now: Callable[[], float] = time.monotonic) -> None:
        self._model_name = model_name
        self._first_s = 0.0 if at_once else _LOG_EVERY_S
        self._now = now
        self._times: dict[str, tuple[float, float]] = {}  # when a work began, and when its next line is due

    def __call__(self, progress: Progress) -> None:
        now, what = self._now(), progress.what
        began, due = self._times.setdefault(what, (now, now + self._first_s))
        if due == math.inf or (now < due and not progress.ended):
            return
        self._times[what] = (began, math.inf if progress.ended else now + _LOG_EVERY_S)
        _forget_oldest(self._times)
        if now < began + self._first_s:
            return
        model = self._model_name
        logger.info("[%s] %s%s", model, what, _amount(progress, now - began), extra=of_model(model))


def _forget_oldest(works: dict[str, _T]) -> _T | None:
    """Take the oldest of too many works away: a worker may name as many as it likes."""
    return works.pop(next(iter(works))) if len(works) > _MAX_WORKS else None


class TerminalProgress:
    """Draws a bar for each piece of work."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        what = progress.what
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=progress.total, amount="")
        oldest = _forget_oldest(self._tasks)
        if oldest is not None:
            self._bars.remove_task(oldest)
        task = self._tasks[what]
        amount = _amount(progress, 0.0, with_share=False).removeprefix(": ")
        self._bars.update(task, completed=progress.done, total=progress.total, amount=amount)

    @property
    def size(self) -> int:
        """The number of bars."""
        return len(self._tasks)

    def close(self) -> None:
        """Remove the bars."""
        for task in self._tasks.values():
            self._bars.remove_task(task)


class Terminal:
    """The bars of all models together: two displays on one terminal would write over each other."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._users: list[TerminalProgress] = []

    def around_lines(self, lines: bytes) -> bytes:
        """Return lines for the terminal with what takes the bars away before them, and leaves room for the next."""
        drawn = sum(user.size for user in list(self._users))  # without the lock of the bars: it may be the log's thread
        if not drawn:
            return lines
        above = drawn - 1
        return b"\r\x1b[2K" + above * b"\x1b[1A\x1b[2K" + lines + above * b"\n"

    @contextmanager
    def progress(self, stream: TextIO) -> Iterator[TerminalProgress]:
        if self._bars is None:
            # transient: the bars disappear at the end, so that only log lines stay on the terminal.
            self._bars = Bars(*_columns(), console=Console(file=stream), transient=True, expand=True)
            self._bars.start()
        shown = TerminalProgress(self._bars)
        self._users.append(shown)
        try:
            yield shown
        finally:
            shown.close()
            self._users.remove(shown)
            if not self._users:
                self._bars.stop()
                self._bars = None


def _columns() -> tuple[ProgressColumn, ...]:
    what, amount = "{task.description}", "{task.fields[amount]}"
    shortened = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    whole = Column(min_width=_AMOUNT_WIDTH, no_wrap=True)
    return (
        TextColumn(what, markup=False, table_column=shortened),
        BarColumn(_BAR_WIDTH, table_column=Column(min_width=_BAR_WIDTH)),
        TextColumn(amount, markup=False, table_column=whole),
    )


TERMINAL = Terminal()
"""That of this process."""


@contextmanager
def show_progress(model_name: str, stream: TextIO, at_once: bool = True) -> Iterator[OnProgress]:
    """Yield a callback for progress: bars if `stream` is a terminal, else log lines.

    `at_once` is that of LogProgress.
    """
    if not stream.isatty():
        yield LogProgress(model_name, at_once)
        return
    with TERMINAL.progress(stream) as shown:
        yield shown


def _amount(progress: Progress, seconds: float, with_share: bool = True) -> str:
    """Return how far the work is; of work without an amount, for how long it has gone on."""
    done, total, rate, unit = progress.done, progress.total, progress.rate, progress.unit
    if total is None and not done:
        return f", for {duration_in_words(seconds)}" if seconds >= 1 else ""
    words = _count(done, unit) if total is None else f"{_count(done, unit)} of {_count(total, unit)}"
    words += f" {unit}" if unit != BYTES else ""
    shown = [f": {words} ({progress.percent} %)" if total is not None and with_share else f": {words}"]
    if not progress.ended:
        shown += [f"{_count(rate, unit)}/s"] if rate else []
        shown += [f"{duration_in_words(progress.left_s)} left"] if progress.left_s else []
    return ", ".join(shown)


def _count(amount: float, unit: str) -> str:
    if unit == BYTES:
        return in_words(round(amount))
    return f"{amount:.0f}" if amount == round(amount) else f"{amount:.1f}"
