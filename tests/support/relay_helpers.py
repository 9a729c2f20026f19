"""Handlers with faults, and a decorator for tests that need an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop
from paths import MODEL_CODE

from lmi_server.contract.protocol import Load
from lmi_server.serving.pool_settings import PoolSettings

HANDLERS = str(MODEL_CODE)
"""The folder of `fault_handlers`, for the PYTHONPATH of a worker."""

FAULTS = "fault_handlers:FaultHandler"


def load_of(directory: Path, handler: str = FAULTS, options: Mapping[str, Any] = {}) -> Load:
    """Return a Load of one of the handlers in `fault_handlers`, whose options are those of the echo handler."""
    own = {"options_type": "handlers.echo.options:EchoOptions"}
    return Load("model", str(directory), handler, {"model_id": str(directory), **options}, ["model"], **own)


def pool_settings(load: Load, **changes: Any) -> PoolSettings:
    """Return the settings of a pool with one worker."""
    settings: dict[str, Any] = {
        "min_workers": 1,
        "max_workers": 1,
        "max_in_flight": 32,
        "max_batch_delay_s": 0.1,
        "job_queue_size": 1000,
        "max_queue_delay_s": None,
        "model_loading_timeout_s": 60.0,
        "predict_timeout_s": 120.0,
        "max_idle_s": 60.0,
        "parallel_loading": False,
        "retry_threshold": 10,
        "quarantine_s": 600.0,
    }
    return PoolSettings(load=load, **{**settings, **changes})


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on uvloop, for at most two minutes."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(120):
                await test(**fixtures)

        uvloop.run(limited())

    return run
