"""The fields of log records beside their text. The log in JSON has them as keys; the log as text does without."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_ATTRIBUTE = "fields"  # of a record


def of_worker(worker: str, **more: str | int) -> dict[str, dict[str, str | int]]:
    """Return the argument `extra` of a record about a worker; `more` are further fields."""
    return {_ATTRIBUTE: {"model": worker.rpartition("-")[0], "worker": worker, **more}}


def of_model(model: str) -> dict[str, dict[str, str | int]]:
    """Return the argument `extra` of a record about a model, which `model` is the label of."""
    return {_ATTRIBUTE: {"model": model}}


def of_record(record: logging.LogRecord) -> Mapping[str, str | int]:
    """Return the fields of a record, {} for one that has none."""
    fields: Mapping[str, str | int] = getattr(record, _ATTRIBUTE, {})
    return fields


class WorkerLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs about one worker: its name stands in front of each text, and is a field."""

    def __init__(self, logger: logging.Logger, worker: str) -> None:
        super().__init__(logger)
        self._worker = worker

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        """Log as the logger does."""
        self.logger.log(level, f"[%s] {msg}", self._worker, *args, extra=of_worker(self._worker), **more)
