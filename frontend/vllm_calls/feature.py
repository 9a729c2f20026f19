"""Answers /sleep, /wake_up, /is_sleeping, /reset_prefix_cache, /abort_requests and the calls for adapters as vLLM does.

They are calls of the management API, on its address and for its clients. Where several models are served, the parameter
`model` names one (`model_version` a version of it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.management_access import protect
from frontend.features import ServerFeature, ServerParts
from frontend.http.parameters import integer, json_fields, truth
from frontend.http.responses import json_response
from frontend.management.adapters import AdapterManagement, lora_of, managed_model
from frontend.management.models import WholePathRoute, to_the_end
from frontend.vllm_calls.settings import SleepSettings
from frontend.vllm_calls.sleeping import ABORT, GONE, PAUSED, WAIT, Sleepers, as_refusal
from lmi_server.contract.errors import AbortedError, BadParameterError, ModelNotReadyError, RequestError
from lmi_server.contract.protocol import Adapter, ResetPrefixCache
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.serving.models.model import Model

_TAGS = frozenset({"weights", "kv_cache"})


class LoadAdapter(msgspec.Struct):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapter(msgspec.Struct):
    """The body of /v1/unload_lora_adapter; vLLM's number of the adapter is not needed."""

    lora_name: str
    lora_int_id: int | None = None


class AbortRequests(msgspec.Struct):
    """The body of /abort_requests; without ids every request of the model is meant."""

    request_ids: list[str] | None = None


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature, which every server has."""
    return VllmCalls(server)


class VllmCalls(ServerFeature):
    """The calls. Each raises LmiServerError, which the application turns into an answer."""

    def __init__(self, server: ServerParts) -> None:
        settings = server.settings
        self._models = server.models
        self._guard = server.access.guard
        self._adapters = AdapterManagement(server.models, server.access.limits)
        sleep = settings.part(SleepSettings)
        self._limit_s = sleep.sleep_timeout
        self._sleepers = Sleepers(settings.drain_timeout, sleep.wake_on_request, sleep.sleep_timeout)

    def management_routes(self) -> list[Route]:
        routes: list[Route] = [
            WholePathRoute("/sleep", {"POST": self.sleep}),
            WholePathRoute("/wake_up", {"POST": self.wake_up}),
            WholePathRoute("/is_sleeping", {"GET": self.is_sleeping}),
            WholePathRoute("/reset_prefix_cache", {"POST": self.reset_prefix_cache}),
            WholePathRoute("/abort", {"POST": self.abort}),
            WholePathRoute("/abort_requests", {"POST": self.abort}),
            WholePathRoute("/v1/load_lora_adapter", {"POST": self.load_adapter}),
            WholePathRoute("/v1/unload_lora_adapter", {"POST": self.unload_adapter}),
        ]
        return protect(routes, self._guard.check)

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._sleepers.keep_asleep(),)

    async def sleep(self, request: Request) -> Response:
        """Put a model to sleep: `level` 0 refuses requests, 1 keeps the weights on the host, 2 ends the workers.

        With `mode=wait`, the default, requests that run finish first; with `mode=abort` they end with an error.
        """
        level = integer(request.query_params, "level", 1)
        mode = request.query_params.get("mode", WAIT)
        if not PAUSED <= level <= GONE:
            raise BadParameterError(f"Parameter level is {level}; it takes 0, 1 or 2")
        if mode not in (ABORT, WAIT):
            raise BadParameterError(f'Parameter mode is "{excerpt(mode)}"; it takes wait or abort')
        await to_the_end(self._sleepers.sleep(self._model(request), level, mode))
        return json_response({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        """Wake a model, and answer once it serves. `tags` may name weights and kv_cache, which wake together."""
        tags = request.query_params.getlist("tags")
        if tags and set(tags) != _TAGS:
            raise BadParameterError("Parameter tags: weights and kv_cache wake together; leave it out")
        await to_the_end(self._sleepers.wake_up(self._model(request)))
        return json_response({"status": "awake", "tags": tags or None})

    async def is_sleeping(self, request: Request) -> Response:
        """Return whether a model is asleep."""
        return json_response({"is_sleeping": self._sleepers.level(self._model(request)) is not None})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Have every worker forget the prefixes of prompts; `success` is false if requests hold some of them."""
        query = request.query_params
        command = ResetPrefixCache(truth(query, "reset_running_requests", False), truth(query, "reset_external", False))
        workers = [worker for pool in self._model(request).pools for worker in pool.roster.ready]
        try:
            async with asyncio.timeout(self._limit_s):
                answers = await asyncio.gather(*(worker.controls.call(command) for worker in workers))
        except RequestError as error:
            raise as_refusal(error) from error
        except TimeoutError:
            late = f"The prefix cache was not reset within sleep_timeout={self._limit_s:g} seconds; call again later"
            raise ModelNotReadyError(late) from None
        return json_response({"success": all(answer == b"true" for answer in answers)})

    async def abort(self, request: Request) -> Response:
        """End the requests of a model that have one of the ids of the body, or all of them; their clients get 503."""
        ids = (await json_fields(request, AbortRequests)).request_ids
        error = AbortedError("The request was aborted by a call to /abort_requests")
        meant = None if ids is None else frozenset(ids)
        counts = [pool.dispatcher.abort(error, meant) for pool in self._model(request).pools]
        return json_response({"status": "aborted", "aborted": sum(counts)})

    async def load_adapter(self, request: Request) -> Response:
        """Add a LoRA adapter to a model. With `load_inplace` it may replace the one of its name."""
        wanted, model = await json_fields(request, LoadAdapter), self._model(request)
        if wanted.is_3d_lora_weight:
            raise BadParameterError("is_3d_lora_weight is true; adapters of that form are not supported")
        name = wanted.lora_name
        if name in lora_of(model) and not wanted.load_inplace:
            raise BadParameterError(f'The adapter "{excerpt(name)}" is loaded; load_inplace=true replaces it')
        await self._adapters.put(model, Adapter(name=name, directory="", alias=name), wanted.lora_path, request)
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        """Remove a LoRA adapter from a model; requests that run with it finish."""
        name = (await json_fields(request, UnloadAdapter)).lora_name
        await self._adapters.remove(self._model(request), name)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    def _model(self, request: Request) -> Model:
        query = request.query_params
        return managed_model(self._models, query.get("model"), query.get("model_version"), "in the parameter model")
