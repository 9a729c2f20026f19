"""Models that are served elsewhere, such as by the nodes of a cluster, or by the servers behind a router."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from lmi_server.contract.errors import BadParameterError, ModelNotReadyError
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.model_store import ModelSource
from lmi_server.serving.models.registry import ModelRegistry, Proof


class FollowedModels(ModelRegistry):
    """Has the models that other servers report. None is registered, unregistered or loaded again here.

    `untold` is why a request is refused before `_told` is set, and `elsewhere` why a change is.
    """

    untold: ClassVar[str]
    elsewhere: ClassVar[str]

    def __init__(self, *server: Any, **more: Any) -> None:
        super().__init__(*server, **more)
        self._told = asyncio.Event()  # which models there are

    async def until_told(self) -> None:
        await self._told.wait()

    def refuse_if_untold(self) -> None:
        if not self._told.is_set():
            raise ModelNotReadyError(self.untold)

    def reads_by_code(self, model: Model) -> bool:
        """Return True: the files of the model are where it is served, so that names are judged there."""
        return True

    async def register_and_load(self, source: ModelSource) -> Model:
        raise BadParameterError(self.elsewhere)

    async def unregister(self, name: str, version: str | None = None) -> None:
        raise BadParameterError(self.elsewhere)

    async def reload_model(self, model: Model, prove: Proof | None = None) -> None:
        raise BadParameterError(self.elsewhere)
