"""A server that stands where the dispatcher has a worker: it gets requests over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlencode

from lmi_server.contract.errors import LmiServerError, RequestError, ServingError
from lmi_server.contract.link import WorkerLink
from lmi_server.contract.protocol import (
    RECALLED,
    Cancel,
    Control,
    End,
    Error,
    Frame,
    Hold,
    Input,
    Item,
    Message,
    Reply,
    ResetPrefixCache,
    Sleep,
    Submit,
    WakeUp,
)
from lmi_server.route.connection import Connections
from lmi_server.route.exchange import RoutedExchange
from lmi_server.route.headers import request_lines
from lmi_server.supervisor.launch.remote import RemoteLaunch, RemotePlace
from lmi_server.supervisor.worker_requests import ControlCalls, WorkerRequests

logger = logging.getLogger(__name__)

_MAX_TRIES = 10


class Site(NamedTuple):
    """What all servers behind one URL have: the Host header, the path in front of all others, and a key for them."""

    url: str
    host: str
    base: str
    key: str | None


class Backend:
    """One model at one server, with the parts of a `WorkerProcess` that a pool uses.

    `paths` has the path of each route. `on_items` gets what comes, `on_unreachable` is called if no connection can be
    opened, `on_usage` gets the key of a request and the tokens that it took.
    """

    pid = None
    is_local = False
    load_s = 0.0
    ready_at = 0.0
    is_ending = False

    def __init__(
        self,
        name: str,
        site: Site,
        connections: Connections,
        paths: Mapping[str, str],
        on_items: Callable[[Backend, list[Frame]], None],
        on_unreachable: Callable[[str], None],
        on_usage: Callable[[bytes, int], None],
    ) -> None:
        self.name = name
        self.gauges: Mapping[str, float] = {}
        self.is_retiring = False
        self.lost = asyncio.Event()
        self.cause: LmiServerError = ServingError("The server ended while it held the request")
        self._site = site
        self._connections = connections
        self._paths = paths
        self._on_items = on_items
        self._on_unreachable = on_unreachable
        self._on_usage = on_usage
        self._exchanges: dict[int, RoutedExchange] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        link = cast(WorkerLink, self)  # which sends, and nothing else
        self.requests = WorkerRequests(link, RemoteLaunch(RemotePlace(host="", port=0, token="")))
        self.controls = ControlCalls(link)

    # --- the link's side ---

    def send(self, message: Message) -> None:
        """Do what the dispatcher asks of a worker; answers come later, never within this call."""
        match message:
            case Submit(number, request):
                self._submit(number, request)
            case Cancel(number):
                if number in self._exchanges:
                    self._loop.call_soon(self._cancel, number)
            case Hold(number, held):
                exchange = self._exchanges.get(number)
                if exchange is not None and exchange.connection is not None:
                    exchange.connection.hold(held)
            case Control(number, Sleep() | WakeUp() | ResetPrefixCache() as command):
                refusal = f"A router does not pass on {command.operation}; call it at the servers"
                self._loop.call_soon(self._emit, Error(number, RequestError.__name__, refusal))
            case Control(number):  # adapters are there already, and metrics are asked for at the servers
                self._loop.call_soon(self._emit, Reply(number, 200, [], b""))
            case _:
                pass

    def _submit(self, number: int, request: Input) -> None:
        job = self.requests.in_flight.get(number)
        tenant = b"" if job is None else job.tenant
        exchange = RoutedExchange(
            number, len(request.body()), self._emit, lambda tokens: self._on_usage(tenant, tokens)
        )
        self._exchanges[number] = exchange
        connection = self._connections.idle()
        if connection is not None:
            exchange.connection = connection
            connection.send(self._head(request), request.body(), exchange)
            return
        self._opening[number] = task = self._loop.create_task(self._open(exchange, request))
        task.add_done_callback(lambda task: self._on_task_end(exchange, task))

    def _on_task_end(self, exchange: RoutedExchange, task: asyncio.Task[None]) -> None:
        """End a request that an error of this router has stopped: it would wait for ever."""
        self._opening.pop(exchange.id, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("request %d could not be sent to %s", exchange.id, self.name, exc_info=error)
            exchange.fail("was not reached, because of an error of the router")

    async def _open(self, exchange: RoutedExchange, request: Input) -> None:
        try:
            connection = await self._connections.open()
        except OSError as error:
            reason = str(error) or "it does not answer"
            self._on_unreachable(reason)
            exchange.give_back(self._refusal(exchange.id, reason))
            return
        if exchange.id not in self._exchanges:  # it ended meanwhile
            connection.abort()
            return
        exchange.connection = connection
        connection.send(self._head(request), request.body(), exchange)

    def _refusal(self, number: int, reason: str) -> Error:
        """Return what ends a request that was not sent: another server gets it, unless several could not be reached."""
        job = self.requests.in_flight.get(number)
        if job is None or len(job.attempts) < _MAX_TRIES:
            return Error(number, RECALLED, reason)
        return Error(number, "ModelNotReadyError", f"No server could be reached in {_MAX_TRIES} tries: {reason}")

    def _head(self, request: Input) -> bytes:
        query = urlencode([pair for pair in request.content if pair[0] != "data"])
        path = f"{self._site.base}{self._paths[request.route]}{'?' if query else ''}{query}"
        start = f"POST {path} HTTP/1.1\r\nhost: {self._site.host}\r\ncontent-length: {len(request.body())}\r\n"
        return start.encode("latin-1") + request_lines(request, self._site.key) + b"\r\n"

    def _cancel(self, number: int) -> None:
        exchange = self._exchanges.get(number)
        task = self._opening.pop(number, None)
        if task is not None:
            task.cancel()
        if exchange is not None:
            exchange.cancel()

    def _emit(self, item: Item) -> None:
        if isinstance(item, Reply | End | Error):
            self._exchanges.pop(item.id, None)
        self._on_items(self, [item])

    # --- the pool's side ---

    def set_log_level(self, level: str, name: str) -> None:
        """Do nothing: a server has its own level."""

    def retire(self, deadline_s: float) -> None:
        """Let the server finish what it holds here."""
        self.is_retiring = True

    async def shutdown(self, deadline_s: float) -> None:
        """End: the pool has ended every request that clients wait for."""
        self.kill()

    def kill(self) -> None:
        """Close the connections of all requests; each fails that has not ended."""
        for number, exchange in list(self._exchanges.items()):
            task = self._opening.pop(number, None)
            if task is not None:
                task.cancel()
            exchange.fail("makes no progress, or this router ends")

    async def reap(self) -> None:
        """Return: no process of it is here."""
