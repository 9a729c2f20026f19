"""What the optional features of the table (lmi_server/features.py) may add to a server.

An entry names a function that takes the `ServerParts` and returns a `ServerFeature`: routes, paths for inference, a
wrapper of inference, tasks. It returns None if the settings do not ask for the feature, or if nothing more is to be
done. The app and the server go through the features that there are, and know none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.responses import Response
from starlette.routing import Route

from frontend.access.management_access import Access
from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.responses import error_response
from frontend.observability.metrics.collector import Metrics
from frontend.observability.server_log import LogTail
from frontend.relay.relay import Relay
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import RouteNotFoundError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.features import FEATURES, load
from lmi_server.serving.models.registry import ModelRegistry

Taker = Callable[[Scope, Receive, Send], Awaitable[bool]]
"""What answers a request, or returns False and leaves it to the routes."""


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The parts of one server that features use.

    `answer` sends a response with the headers that every answer has. `check` raises an LmiServerError for a request of
    a client, or of a web page, that may not use the models; it is None if everyone may.
    """

    models: ModelRegistry
    metrics: Metrics
    relay: Relay
    settings: ServerSettings
    access: Access
    log_tail: LogTail
    answer: Callable[[Response, Scope, Receive, Send], Awaitable[None]]
    check: Callable[[Scope], object] | None


class ServerFeature:
    """What one feature adds to a server: by default nothing.

    - `paths`: paths for inference as the OpenAPI document has them, each with its route.
    - `answer_types`: the unusual content types of the answers at those paths.
    - `targets`: for the paths with this beginning, what returns where a request goes; None if it is not for inference.
    - `takers`: the target of other requests than inference with this beginning, before the routes.
    - `management_takers`: the same for whole paths on the address of the management API, before inference.
    - `page`: the name and the path of its page for people, on the address of the management API.
    """

    paths: Mapping[str, str] = {}
    answer_types: Mapping[str, str] = {}
    targets: Mapping[str, Callable[[str], Target | None]] = {}
    takers: Mapping[str, Taker] = {}
    management_takers: Mapping[str, Taker] = {}
    page: tuple[str, str] | None = None

    def wrap(self, infer: Inference) -> Inference:
        """Return what answers inference requests in place of `infer`."""
        return infer

    def health_routes(self) -> list[Route]:
        """Return routes of health checks, which are on both addresses."""
        return []

    def request_routes(self) -> list[Route]:
        """Return routes on the address for requests, for the clients that may use the models."""
        return []

    def management_routes(self) -> list[Route]:
        """Return routes on the address of the management API, each with a check of its own."""
        return []

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs from the start of the server until it drains."""
        return ()

    def drain(self) -> None:
        """Begin to end."""

    async def finish(self) -> None:
        """Wait until the requests that run without a client have ended, and their answers are stored."""

    def give_up(self) -> None:
        """Log which answers are not stored."""


class Unset(ServerFeature):
    """Answers the paths of a feature that is switched off: 404, with the name of the setting."""

    def __init__(self, server: ServerParts, setting: str, *beginnings: str) -> None:
        async def refuse(scope: Scope, receive: Receive, send: Send) -> bool:
            path = scope["path"]
            if scope["method"] == "OPTIONS" or not f"{path}/".startswith(tuple(f"{each}/" for each in beginnings)):
                return False
            message = f"Requested resource is not found: {excerpt(path)}; the setting {setting} switches it on"
            await server.answer(error_response(path, RouteNotFoundError(message)), scope, receive, send)
            return True

        self.takers = dict.fromkeys(beginnings, refuse)


def attach_features(parts: ServerParts) -> list[ServerFeature]:
    """Return what the features of the table add to a server. Raises ConfigurationError."""
    attaching = [load(spec.server) for spec in FEATURES if spec.server]
    added = [cast("Callable[[ServerParts], ServerFeature | None]", attach)(parts) for attach in attaching]
    return [feature for feature in added if feature is not None]
