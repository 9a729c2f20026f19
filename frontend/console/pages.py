"""The console: a page at `/console` for people, and what it asks the server for.

The page is static, so that it may be loaded without a key; it asks for one if the management API wants one. It manages
models by that API, and gets changes as server-sent events (`frontend/console/feed.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from frontend.access.management_access import ManagementGuard, protect
from frontend.console.feed import ConsoleFeed
from frontend.console.requests import KEPT, RecentRequests
from frontend.http.clients import Receive, Scope, Send
from frontend.http.parameters import integer
from frontend.http.responses import json_response
from frontend.management.models import describe_model
from frontend.relay.relay import Relay
from lmi_server.contract.errors import LmiServerError, RouteNotFoundError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.sendable import json_bytes
from lmi_server.dialects.routes import CHAT_COMPLETIONS
from lmi_server.explain.explanation import explain_values, memory_of_running
from lmi_server.machine.environment import process_environment
from lmi_server.machine.inventory import this_machine, with_gpu_memory
from lmi_server.processes.tree import tree_resident_bytes
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry

PAGE = "/console"
CHAT = "/console/chat/completions"

_NUMBER = re.compile(r"[0-9]{1,15}")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_OWN = (
    "console.css",
    "console.js",
    "connection.js",
    "live.js",
    "models.js",
    "requests.js",
    "chat.js",
    "forms.js",
    "repeated.js",
    "trial.js",
    "text.js",
    "htm-preact.js",
)
_PLOTS = ("language.js", "uPlot.iife.min.js", "uPlot.min.css")  # as in the reports of lmi-server bench
# No inline script or style, nothing from elsewhere, no frame: what a model writes can at worst be read.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


class Console:
    """The page and its endpoints, for clients that `guard` lets manage models."""

    def __init__(
        self, models: ModelRegistry, relay: Relay, guard: ManagementGuard, feed: ConsoleFeed, recent: RecentRequests
    ) -> None:
        self._models = models
        self._relay = relay
        self._guard = guard
        self._feed = feed
        self._recent = recent

    def routes(self) -> list[Route]:
        page = [
            Route(PAGE, self.page, methods=["GET"], include_in_schema=False),
            *(Route(f"{PAGE}/{name}", self.file, methods=["GET"], include_in_schema=False) for name in self._files),
        ]
        data = [
            Route(f"{PAGE}/live", self.live, methods=["GET"], include_in_schema=False),
            Route(f"{PAGE}/history", self.history, methods=["GET"], include_in_schema=False),
            Route(f"{PAGE}/requests", self.requests, methods=["GET"], include_in_schema=False),
            Route(f"{PAGE}/requests/{{number}}", self.request, methods=["GET"], include_in_schema=False),
            Route(f"{PAGE}/models/{{model}}", self.details, methods=["GET"], include_in_schema=False),
            Route(f"{PAGE}/models/{{model}}/{{version}}", self.details, methods=["GET"], include_in_schema=False),
        ]
        return [*protect(page, self._guard.check_page), *protect(data, self._guard.check)]

    @cached_property
    def _files(self) -> Mapping[str, bytes]:
        own, plots = files("frontend.console"), files("lmi_server.plots")
        found = {name: own.joinpath("static", name).read_bytes() for name in (*_OWN, "console.html")}
        return found | {name: plots.joinpath("static", name).read_bytes() for name in _PLOTS}

    async def page(self, request: Request) -> Response:
        """Return the page; its links are relative, so that it works behind any prefix."""
        if request.scope.get("raw_path", b"").endswith(b"/"):
            return RedirectResponse(f"..{PAGE}", headers=_HEADERS)
        return self._static("console.html")

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        return self._static(request.scope["path"].removeprefix(f"{PAGE}/"))

    def _static(self, name: str) -> Response:
        media_type = _TYPES[name.rpartition(".")[2]]
        return Response(self._files[name], headers=_HEADERS, media_type=media_type)

    async def live(self, request: Request) -> Response:
        """Return what changes as server-sent events, once a second until the client leaves."""
        return StreamingResponse(self._feed.events(), headers=_HEADERS, media_type="text/event-stream")

    async def history(self, request: Request) -> Response:
        """Return the figures of the last five minutes or the last hour, of all models or of one, as the query says."""
        query = request.query_params
        found = self._feed.history(query.get("model", ""), query.get("span") == "hour")
        return Response(found, headers=_HEADERS, media_type="application/json")

    async def requests(self, request: Request) -> Response:
        """Return a page of the requests that have ended, the newest first."""
        query = request.query_params
        number = max(0, integer(query, "page", 0))
        return _json(self._recent.page(query.get("model", ""), query.get("id", ""), "failed" in query, number))

    async def request(self, request: Request) -> Response:
        """Return one request that has ended. Raises RouteNotFoundError if it is not kept any more."""
        text = request.path_params["number"]
        found = self._recent.details(int(text)) if _NUMBER.fullmatch(text) else None
        if found is None:
            raise RouteNotFoundError(f"request {excerpt(text)} is not kept; the console has the last {KEPT}")
        return _json(found)

    async def details(self, request: Request) -> Response:
        """Return one version of a model: its workers, its values with their layers, and its memory."""
        name = request.path_params["model"]
        model = self._models.endpoint(name).version(request.path_params.get("version"))
        return json_response(await self._details(model))

    async def _details(self, model: Model) -> dict[str, Any]:
        found: dict[str, Any] = {"server": version("lmi-server"), **describe_model(model)}
        found["adapters"] = model.adapter_names
        if model.resolved is not None:
            found |= await asyncio.to_thread(_configuration, model)
        return found

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a chat as /v1/chat/completions does, for clients that may manage models; they need no other key."""
        try:
            self._guard.check(scope)
        except LmiServerError as error:
            await self._relay.refuse(CHAT_COMPLETIONS, error, scope, receive, send)
            return
        await self._relay((CHAT_COMPLETIONS, None, None), scope, receive, send)

    def close(self) -> None:
        """End the streams of all pages."""
        self._feed.close()


def _json(value: object) -> Response:
    return Response(json_bytes(value), headers=_HEADERS, media_type="application/json")


def is_for_people(scope: Scope) -> bool:
    """Return whether a request is that of a browser for the root of the server."""
    if scope["path"] != "/" or scope["method"] != "GET":
        return False
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def to_console() -> Response:
    return RedirectResponse(PAGE.removeprefix("/"), headers=_HEADERS)


def _configuration(model: Model) -> dict[str, Any]:
    """Return the values of a model with their layers, and its memory. This reads files, so that it is for a thread."""
    resolved = model.resolved
    assert resolved is not None
    environment = process_environment()
    machine = with_gpu_memory(this_machine(environment), environment)
    needed = memory_of_running(resolved, machine)
    pids = {} if model.pool is None else model.pool.roster.pids
    return {
        "handler": resolved.spec.title,
        "modelDir": resolved.model_dir,
        "warnings": list(resolved.warnings),
        "options": [asdict(explained) for explained in explain_values(resolved)],
        "memory": {**asdict(needed), "kv_tokens_that_fit": needed.kv_tokens_that_fit},
        "resident": {worker: tree_resident_bytes(pid) for worker, pid in pids.items()},
    }
