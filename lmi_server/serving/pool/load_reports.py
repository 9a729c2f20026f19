"""How far the loads of a pool's workers are: for descriptions of the model, and as lines of the log."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from lmi_server.artifacts.progress import LogProgress
from lmi_server.contract.progress import Progress
from lmi_server.serving.roster import WorkerRoster


class LoadStatus(NamedTuple):
    """How far a load is, and when it began: a time.time()."""

    progress: Progress
    began_at: float


class LoadReports(ABC):
    """Logs how far the loads of a pool are; a subclass says what they are."""

    def __init__(self, label: str, now: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._now = now
        self._log: LogProgress | None = None

    @property
    @abstractmethod
    def current(self) -> LoadStatus | None:
        """Return how far the load is that goes on; None if none does."""

    def check(self) -> None:
        """Log how far it is if that is due; the pool calls this every second."""
        load = self.current
        if load is None:
            self._log = None  # the next load does the same work anew
            return
        self._log = self._log or LogProgress(self._label, at_once=False, now=self._now)
        self._log(load.progress)


class WorkerLoads(LoadReports):
    """The loads of workers that join a model which serves already: after a restart, or because more are wanted."""

    def __init__(self, label: str, roster: WorkerRoster, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(label, now)
        self._roster = roster

    @property
    def current(self) -> LoadStatus | None:
        """Return how far the first worker is that loads; None if none does."""
        worker = self._roster.loading
        if worker is None:
            return None
        return LoadStatus(worker.loading or Progress("starting a worker"), worker.started_at)
