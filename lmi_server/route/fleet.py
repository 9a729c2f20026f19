"""The servers behind the URLs of a router: where they are, whether they can serve, and which models they have.

A name may have several addresses, each a server: a headless service of Kubernetes, the nodes of a cluster.
Names are looked up again at every check, so that new addresses get requests and old ones only finish theirs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lmi_server.contract.errors import ConfigurationError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.secrets import SECRETS
from lmi_server.route.backend import Site
from lmi_server.route.connection import Connections, Headers, Peer

logger = logging.getLogger(__name__)

_CHECK_S = 5.0  # for the answer to one check
_OK = 200
_NOT_FOUND = (404, 405)
_MAX_ANSWER = 4 << 20  # bytes of a list of models
_MAX_MODELS, _LONGEST_NAME = 1000, 256
_SHOWN = 10  # models in a line of the log
_MAX_ADDRESSES = 256  # of one name
_LOOK_UP_S = 1.0  # for which the checks wait for a name server
_MAX_LOOK_UPS = 64  # at a time
_UNNAMED = "default"  # the model of a server without a list of models


class _Listed(msgspec.Struct):
    """A model in the list of a server; an adapter names its `parent`."""

    id: str
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[_Listed] = []


class CheckError(Exception):
    """A server does not answer a check as one that can serve."""


class Server:
    """One address. `models` has the models that it serves, each with its adapters; empty unless it `is_healthy`."""

    def __init__(self, site: Site, peer: Peer) -> None:
        self.site = site
        self.peer = peer
        self.connections = Connections(peer)
        self._checks = Connections(peer)  # apart: these are closed after each answer, and no request may have one then
        self.is_healthy = False
        self.reason = "it was not asked yet"
        self.models: Mapping[str, frozenset[str]] = {}
        self._late = 0  # checks without an answer in time, one after the other

    @property
    def label(self) -> str:
        host = f"[{self.peer.address}]" if ":" in self.peer.address else self.peer.address
        return f"{host}:{self.peer.port}{self.site.base}"

    async def check(self) -> None:
        """Ask whether it can serve, and what."""
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._check_health()
                models = await self._ask_models()
        except TimeoutError:
            self._late += 1  # one may be due to a server that computes, and answers nothing meanwhile
            if self._late > 1 or not self.is_healthy:
                self.note(f"it did not answer within {_CHECK_S:g} seconds")
            return
        except (CheckError, OSError) as error:
            self.note(str(error))
            return
        self._late = 0
        self.models = models
        if not self.is_healthy:
            shown = ", ".join(map(excerpt, itertools.islice(models, _SHOWN))) or "no models"
            logger.info("server %s: ready with %s%s", self.label, shown, ", ..." if len(models) > _SHOWN else "")
        self.is_healthy = True

    def note(self, reason: str) -> None:
        """Record that it cannot serve now."""
        if self.is_healthy or reason != self.reason:
            logger.warning("server %s: no requests, because %s", self.label, excerpt(reason))
        self.is_healthy = False
        self.reason = reason

    async def _check_health(self) -> None:
        status, _ = await self._get("/health")
        if status != _OK and status not in _NOT_FOUND:  # OpenAI's API has no /health
            raise CheckError(f"/health answers {status}")

    async def _ask_models(self) -> Mapping[str, frozenset[str]]:
        status, body = await self._get("/v1/models")
        if status in _NOT_FOUND:
            return {_UNNAMED: frozenset()}
        if status != _OK:
            raise CheckError(f"/v1/models answers {status}")
        try:
            listed = msgspec.json.decode(body, type=_List).data
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise CheckError("/v1/models is no list of models") from None
        return _sorted_models(listed)

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises OSError and CheckError."""
        answer = _Answer()
        connection = await self._checks.open()  # a server that takes no new connections cannot serve
        key = "" if self.site.key is None else f"authorization: Bearer {self.site.key}\r\n"
        head = f"GET {self.site.base}{path} HTTP/1.1\r\nhost: {self.site.host}\r\n{key}via: 1.1 lmi-server\r\n\r\n"
        connection.send(head.encode("latin-1"), b"", answer)
        try:
            return await answer.whole
        finally:
            connection.abort()


class _Answer:
    """Collects a short answer."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if len(self._body) + len(data) <= _MAX_ANSWER:
            self._body += data
        else:
            self._fail(f"its answer is longer than {_MAX_ANSWER} bytes")

    def on_end(self) -> None:
        if not self.whole.done():
            self.whole.set_result((self._status, bytes(self._body)))

    def on_break(self, reason: str) -> None:
        self._fail(f"it {reason}")

    def _fail(self, reason: str) -> None:
        if not self.whole.done():
            self.whole.set_exception(CheckError(reason))


class Fleet:
    """Every server. `on_checked` is called after each round of checks, and when a server cannot be reached."""

    def __init__(self, urls: Sequence[str], key: str | None, every_s: float) -> None:
        """Raises ConfigurationError for what is no URL of a server."""
        self.servers: dict[tuple[str, Peer], Server] = {}
        self.on_checked: Callable[[], None] = lambda: None
        threads = ThreadPoolExecutor(_MAX_LOOK_UPS, "names")
        self._places = [_Place(url, key, threads) for url in dict.fromkeys(urls)]
        self._look_ups: dict[_Place, asyncio.Task[None]] = {}
        self._late: set[_Place] = set()
        self._every_s = every_s
        self._wanted = asyncio.Event()

    @property
    def healthy(self) -> list[Server]:
        return [server for server in self.servers.values() if server.is_healthy]

    async def run(self) -> None:
        """Check all servers again and again."""
        while True:
            self._wanted.clear()
            await self._follow_all()
            await asyncio.gather(*(self._check(server) for server in self.servers.values()))
            for server in self.servers.values():
                server.connections.close_idle()
            self.on_checked()
            try:
                async with asyncio.timeout(self._every_s):
                    await self._wanted.wait()
                await asyncio.sleep(min(0.2, self._every_s))  # a server that goes up and down is not asked all the time
            except TimeoutError:
                pass

    def note_unreachable(self, server: Server, reason: str) -> None:
        """Record that no connection to a server can be opened."""
        server.note(reason)
        self._wanted.set()
        self.on_checked()

    async def _check(self, server: Server) -> None:
        """Check a server. Requests that it can have now do not wait for the checks of others."""
        was_healthy = server.is_healthy
        await server.check()
        if server.is_healthy != was_healthy:
            self.on_checked()

    async def _follow_all(self) -> None:
        """Look up every name again. A name server that is late delays one check, and then this name alone."""
        begun = [place for place in self._places if place not in self._look_ups]
        for place in begun:
            self._look_ups[place] = task = asyncio.create_task(self._follow(place))
            task.add_done_callback(partial(self._looked_up, place))
        tasks = [self._look_ups[place] for place in begun]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_LOOK_UP_S)
            self._late.update(place for place, task in zip(begun, tasks, strict=True) if task in late)

    def _looked_up(self, place: _Place, task: asyncio.Task[None]) -> None:
        del self._look_ups[place]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s cannot be looked up", place.site.host, exc_info=error)
        if place in self._late:  # what it has found was not checked yet
            self._late.remove(place)
            self._wanted.set()

    async def _follow(self, place: _Place) -> None:
        """Have a server for each address that the name has now."""
        peers = await place.peers()
        if peers is None:
            return  # the name server does not answer: what was known stays
        url = place.site.url
        for known in [known for known in self.servers if known[0] == url and known[1] not in peers]:
            logger.info("server %s: its name has this address no more", self.servers[known].label)
            self.servers.pop(known).connections.retire()
        for peer in peers:
            self.servers.setdefault((url, peer), Server(place.site, peer))


class _Place:
    """One URL."""

    def __init__(self, url: str, key: str | None, threads: Executor) -> None:
        """`threads` wait for the name server."""
        self._threads = threads
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as a look-up would, which ends the checks of all servers
        except ValueError as error:
            shown = excerpt(url.rpartition("@")[2])
            raise ConfigurationError(f'URL = "{shown}" is not allowed: {error}') from None
        is_plain = parts.scheme == "http"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            shown = excerpt(SECRETS.mask(url))
            raise ConfigurationError(f'URL = "{shown}" is not allowed; write http://HOST:PORT or https://HOST')
        if parts.username is not None or not all("!" <= character <= "~" for character in url):
            raise ConfigurationError(
                f'URL = "{excerpt(url.rpartition("@")[2])}" is not allowed with a user, spaces or letters beyond ASCII;'
                " a key for the servers is read from --backend-key-file"
            )
        self._name, self._port = parts.hostname, port or (80 if is_plain else 443)
        self._context = None if is_plain else ssl.create_default_context()
        base = parts.path.rstrip("/").removesuffix("/v1")  # as clients of OpenAI write the address
        self.site = Site(url, parts.netloc, base, key)

    async def peers(self) -> set[Peer] | None:
        """Return where its servers are; None if the name cannot be looked up now."""
        try:
            found = await self._look_up()
        except OSError as error:
            logger.warning("%s cannot be looked up: %s", self._name, error)
            return None
        # An address of each family may be one and the same server, so that those of one family count.
        families = {str(each[4][0]): each[0] for each in found}
        chosen = socket.AF_INET if socket.AF_INET in families.values() else socket.AF_INET6
        addresses = [address for address, family in families.items() if family == chosen][:_MAX_ADDRESSES]
        name = None if self._context is None else self._name
        return {Peer(address, self._port, self._context, name) for address in addresses}

    async def _look_up(self) -> Iterable[Any]:
        """Return what the name server says; an address in digits needs none."""
        asked = partial(socket.getaddrinfo, self._name, self._port, type=socket.SOCK_STREAM)
        try:
            return asked(flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return await asyncio.get_running_loop().run_in_executor(self._threads, asked)


def _sorted_models(listed: Sequence[_Listed]) -> Mapping[str, frozenset[str]]:
    """Return the models with their adapters; what is too much, or no name, is left out."""
    able = [
        each for each in listed[:_MAX_MODELS] if each.id and len(each.id) <= _LONGEST_NAME and each.id.isprintable()
    ]
    names = {each.id for each in able}
    parents = {each.id: each.parent for each in able if each.parent in names and each.parent != each.id}
    bases = sorted(name for name in names if parents.get(name) is None or parents[name] in parents)
    return {
        base: frozenset(name for name, parent in parents.items() if parent == base and name not in bases)
        for base in bases
    }
