"""Processes that an engine of this process spawns: they import the libraries as cheaply as a worker does."""

from __future__ import annotations

from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from lmi_server.processes import model_imports


def prepare_imports() -> None:
    """Have what this process spawns, and what that spawns in turn, call model_imports.prepare_spawned() first."""
    SpawnContext.Process = _PreparedProcess


class _PreparedProcess(SpawnProcess):
    """A spawned process unpickles its task, and so imports the libraries; what this class reduces to comes before."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepared, (), vars(self)


def _prepared() -> _PreparedProcess:
    model_imports.prepare_spawned()
    prepare_imports()
    return _PreparedProcess.__new__(_PreparedProcess)
