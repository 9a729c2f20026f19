"""The console of a server, unless `console` is false."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.routing import Route

from frontend.console.feed import ConsoleFeed
from frontend.console.pages import CHAT, PAGE, Console, is_for_people, to_console
from frontend.console.requests import RecentRequests
from frontend.console.settings import ConsoleSettings
from frontend.features import ServerFeature, ServerParts
from frontend.http.clients import Receive, Scope, Send


def attach(server: ServerParts) -> ServerFeature | None:
    """Return the feature; None if it is switched off."""
    return _Feature(server) if server.settings.part(ConsoleSettings).console else None


class _Feature(ServerFeature):
    page = ("console", PAGE)

    def __init__(self, server: ServerParts) -> None:
        self._answer = server.answer
        self._feed = ConsoleFeed(lambda: server.models.models, server.metrics, server.log_tail)
        recent = RecentRequests()
        server.relay.reports.listeners.append(recent.add)
        self._console = Console(server.models, server.relay, server.access.guard, self._feed, recent)
        self.management_takers = {CHAT: self._chat, "/": self._root}

    def management_routes(self) -> list[Route]:
        return self._console.routes()

    def tasks(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._feed.run(),)

    def drain(self) -> None:
        self._feed.close()  # its pages get no more events

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> bool:
        if scope["method"] != "POST":
            return False
        await self._console.chat(scope, receive, send)
        return True

    async def _root(self, scope: Scope, receive: Receive, send: Send) -> bool:
        if not is_for_people(scope):
            return False
        await self._answer(to_console(), scope, receive, send)
        return True
