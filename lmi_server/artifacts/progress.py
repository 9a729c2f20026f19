"""Progress of a fetch, shown as bars on a terminal and as log lines elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from lmi_server.contract.errors import ArtifactError
from lmi_server.contract.texts.log_fields import of_model
from lmi_server.contract.texts.sizes import in_words

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` bytes of `what` are here; `total` is None if it is unknown, or if the work has no bytes."""

    what: str
    done: int = 0
    total: int | None = None


OnProgress = Callable[[Progress], None]


class Activity:
    """Connects a fetch, which runs in a thread, with its caller: progress goes one way, cancellation the other."""

    def __init__(self, on_progress: OnProgress = lambda progress: None) -> None:
        self._on_progress = on_progress
        self._cancelled = threading.Event()

    def report(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Report progress. Raises ArtifactError if the fetch was cancelled."""
        self.check()
        self._on_progress(Progress(what, done, total))

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
    """Logs a line when the fetch of something starts and ends, and every ten seconds in between."""

    def __init__(self, model_name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._model_name = model_name
        self._now = now
        self._next_at: dict[str, float] = {}
        self._finished: set[str] = set()

    def __call__(self, progress: Progress) -> None:
        now = self._now()
        ended = progress.total is not None and progress.done >= progress.total
        if progress.what in self._finished or (not ended and now < self._next_at.get(progress.what, now)):
            return
        self._next_at[progress.what] = now + _LOG_EVERY_S
        if ended:
            self._finished.add(progress.what)
        model = self._model_name
        logger.info("[%s] %s%s", model, progress.what, _amount(progress), extra=of_model(model))


class TerminalProgress:
    """Draws a bar for each thing that is fetched."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks = {task.description: task.id for task in bars.tasks}

    def __call__(self, progress: Progress) -> None:
        if progress.what not in self._tasks:
            self._tasks[progress.what] = self._bars.add_task(progress.what, total=progress.total)
        self._bars.update(self._tasks[progress.what], completed=progress.done, total=progress.total)


@contextmanager
def show_progress(model_name: str, stream: TextIO) -> Iterator[OnProgress]:
    """Yield a callback for progress: bars if `stream` is a terminal, else log lines."""
    if not stream.isatty():
        yield LogProgress(model_name)
        return
    # transient: the bars disappear at the end, so that only log lines stay on the terminal.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(file=stream), transient=True) as bars:
        yield TerminalProgress(bars)


def _amount(progress: Progress) -> str:
    if progress.total is None:
        return f": {in_words(progress.done)}" if progress.done else ""
    percent = 100 if progress.total == 0 else 100 * progress.done // progress.total
    return f": {in_words(progress.done)} of {in_words(progress.total)} ({percent} %)"
