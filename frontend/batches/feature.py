"""Files and batches, if `batches_store` says where they are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from starlette.routing import Route

from frontend.batches.asking import Asking
from frontend.batches.batches_api import BatchesApi
from frontend.batches.files_api import FilesApi
from frontend.batches.pace import LinePace
from frontend.batches.records import OwnedRecords
from frontend.batches.run import RunParts
from frontend.batches.runner import BatchRunner
from frontend.batches.settings import BatchSettings
from frontend.features import ServerFeature, ServerParts, Unset
from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.storage.objects import StoreThreads, open_store

_THREADS = 16


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature; without a store what says so. Raises ConfigurationError if the store cannot be used."""
    place = server.settings.part(BatchSettings).batches_store
    return Unset(server, "batches_store", "/v1/files", "/v1/batches") if place is None else _Feature(server, place)


class _Feature(ServerFeature):
    def __init__(self, server: ServerParts, place: str) -> None:
        self._server = server
        settings = server.settings.part(BatchSettings)
        records = OwnedRecords(open_store(place, "batches_store"))
        threads = StoreThreads(_THREADS, "batches")
        self._pace = pace = LinePace(settings.batches_concurrency, settings.batches_beside_live)
        asking = Asking(server.relay, server.models, pace, server.settings.request_id_header)
        parts = RunParts(records, threads, asking, settings, server.settings.max_request_size)
        self._runner = BatchRunner(parts, server.access.keys)
        files = FilesApi(records, threads, settings)
        self._routes = [*files.routes(), *BatchesApi(records, threads, settings, self._runner).routes()]

    def wrap(self, infer: Inference) -> Inference:
        """Return `infer`, before whose requests lines make way."""
        note_live, models = self._pace.note_live, self._server.models

        def call(target: Target, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            if models.only is not None:
                note_live()
            return infer(target, scope, receive, send)

        return call

    def request_routes(self) -> list[Route]:
        return self._routes

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._runner.serve(),)

    def drain(self) -> None:
        self._runner.drain()

    async def finish(self) -> None:
        await self._runner.finish()
