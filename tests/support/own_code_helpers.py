"""Model directories with a model.py, and a server for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model_directories import write_properties
from paths import MODEL_CODE
from server_helpers import Server, running

MODELS = MODEL_CODE / "own_code"


def make_own(directory: Path, code: str | Path, **options: Any) -> Path:
    """Make a model directory with this model.py (its text, or the directory of tests/models/own_code that has it)."""
    directory.mkdir(parents=True)
    text = (MODELS / code / "model.py").read_text() if isinstance(code, Path) else code
    (directory / "model.py").write_text(text)
    return write_properties(directory, **options)


@contextlib.contextmanager
def serving_own(directory: Path, code: str | Path, workers: int = 1, **options: Any) -> Iterator[Server]:
    """Serve a model named "model" with this model.py; returns once every worker, a fork of the server, is ready."""
    options = {"minWorkers": workers, "maxWorkers": workers, "parallel_loading": "true", **options}
    with running(make_own(directory / "model", code, **options), workers=workers) as server:
        yield server
