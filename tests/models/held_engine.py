"""A rolling batch whose engine waits until all requests of a test are there, however slow the machine is. For tests."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from handlers.huggingface.handler import HuggingFaceHandler
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedEngine

HELD = "held"
"""A file in the model's directory with a number: the engine takes its next step once it has so many requests more."""


class HeldHandler(HuggingFaceHandler):
    """Serves as its base does, but for HELD. The event loop and the heartbeat go on meanwhile."""

    def load_engine(self, model_dir: str, options: HuggingFaceOptions) -> LoadedEngine:
        loaded = super().load_engine(model_dir, options)
        engine: Any = _HeldEngine(loaded.engine, Path(model_dir, HELD))
        return dataclasses.replace(loaded, engine=engine)


class _HeldEngine:
    """The engine that it gets, with steps that do nothing while it is held."""

    def __init__(self, engine: Any, held: Path) -> None:
        self._engine = engine
        self._held = held
        self._added = 0  # since the last step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, *arguments: Any) -> int:
        self._added += 1
        number: int = self._engine.add(*arguments)
        return number

    def step(self) -> None:
        if self._held.exists():
            if self._added < int(self._held.read_text()):
                time.sleep(0.001)
                return
            self._held.unlink()
        self._added = 0
        self._engine.step()
