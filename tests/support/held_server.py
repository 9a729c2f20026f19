"""A server of the rolling batch whose engine waits for the requests of a test (tests/models/held_engine.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import server_helpers
from server_helpers import Server

HANDLER = "held_engine:HeldHandler"
HELD = "held"


def serving(directory: Path, model: Path, **options: Any) -> AbstractContextManager[Server]:
    """Serve a model from `directory` under the rolling batch."""
    options = {"entryPoint": "djl_python.huggingface", "rolling_batch": "scheduler", "dtype": "fp32", **options}
    return server_helpers.serving(directory, HANDLER, libraries="transformers", model_id=model, **options)


def hold(directory: Path, requests: int) -> None:
    """Have the engine that is served from `directory` take its next step once it has so many requests more."""
    held = directory / "model" / HELD
    written = held.with_suffix(".new")
    written.write_text(str(requests))
    written.rename(held)
