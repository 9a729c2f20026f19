"""Loads a model again when its serving.properties changes, if `reload_on_change` asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmi_server.contract.errors import LmiServerError
from lmi_server.files.file_state import FileState
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.models.reload import configuration_state

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class ModelWatch:
    """Looks once a second at the file with the configuration of each model.

    A change counts once the file is the same in two looks: a file is not read before it is complete. A file that is
    gone is no change: some editors remove a file before they write it. A state of the file that could not be loaded is
    not tried again.
    """

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._seen: Mapping[Model, FileState] = {}
        self._tried: dict[Model, FileState] = {}
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Watch until it is cancelled."""
        while True:
            places = {model: model.directory for model in self._models.models if model.directory is not None}
            states = await asyncio.to_thread(_states, places)
            for model in self._changed_models(states):
                logger.info("model %s: its configuration has changed", model.label)
                self._tried[model] = states[model]
                self._begin(model)
            self._seen = states
            self._tried = {model: state for model, state in self._tried.items() if model in states}
            await asyncio.sleep(_LOOK_S)

    def _changed_models(self, states: Mapping[Model, FileState]) -> Iterator[Model]:
        for model, state in states.items():
            is_new = state not in (None, model.configured_by, self._tried.get(model))
            is_complete = state == self._seen.get(model)
            if is_new and is_complete and model.settled.is_set() and not model.is_reloading:
                yield model

    def _begin(self, model: Model) -> None:
        task = asyncio.create_task(self._reload(model))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, model: Model) -> None:
        try:
            await self._models.reload_model(model)
        except LmiServerError:
            return  # it is in the log, and in the description of the model


def _states(places: Mapping[Model, Path]) -> dict[Model, FileState]:
    return {model: configuration_state(directory) for model, directory in places.items()}
