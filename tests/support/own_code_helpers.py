"""Model directories with a model.py, and a server for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paths import MODEL_CODE
from server_helpers import Server, running

MODELS = MODEL_CODE / "own_code"
SERVING = {
    *("batch_size", "job_queue_size", "max_batch_delay", "max_worker_memory_mb", "maxWorkers", "minWorkers"),
    *("quarantine_time", "retry_threshold"),
}


def make_own(directory: Path, code: str | Path, **options: Any) -> Path:
    """Make a model directory with this model.py (its text, or the directory of tests/models/own_code that has it)."""
    directory.mkdir(parents=True)
    text = (MODELS / code / "model.py").read_text() if isinstance(code, Path) else code
    (directory / "model.py").write_text(text)
    keys = {name if name in SERVING else f"option.{name}": value for name, value in options.items()}
    (directory / "serving.properties").write_text("\n".join(f"{key}={value}" for key, value in keys.items()))
    return directory


@contextlib.contextmanager
def serving_own(directory: Path, code: str | Path, workers: int = 1, **options: Any) -> Iterator[Server]:
    """Serve a model named "model" with this model.py; returns once every worker, a fork of the server, is ready."""
    options = {"minWorkers": workers, "maxWorkers": workers, "parallel_loading": "true", **options}
    with running(make_own(directory / "model", code, **options)) as server:
        for _ in range(workers):
            server.log_line(r"\] ready: process")
        yield server
