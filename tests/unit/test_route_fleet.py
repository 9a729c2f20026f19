"""Which servers a router knows: each address of a name, as long as the name has it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from relay_helpers import on_loop

from lmi_server.contract.errors import ConfigurationError
from lmi_server.route.connection import Peer
from lmi_server.route.fleet import Fleet, Server

URL = "http://models.example:8000/v1"


class FakePlace:
    """A name with the addresses that a test gives it; None if the name server does not answer."""

    def __init__(self, fleet: Fleet) -> None:
        self.site = fleet._places[0].site
        self.addresses: set[str] | None = set()

    async def peers(self) -> set[Peer] | None:
        return None if self.addresses is None else {Peer(address, 8000) for address in self.addresses}


class ListingServer(asyncio.Protocol):
    """Answers everything with a list of models; `closed` is set while it has no connection."""

    def __init__(self, connections: set[asyncio.BaseTransport], closed: asyncio.Event) -> None:
        self._connections = connections
        self._closed = closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(transport)
        self._closed.clear()

    def data_received(self, data: bytes) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self._transport)
        if not self._connections:
            self._closed.set()


@on_loop
async def test_addresses_come_and_go() -> None:
    fleet = Fleet([URL], None, 1.0)
    place = FakePlace(fleet)
    found = []
    for addresses in ({"10.0.0.1", "10.0.0.2"}, {"10.0.0.2", "10.0.0.3"}, None, set[str]()):
        place.addresses = addresses
        before = dict(fleet.servers)
        await fleet._follow(cast(Any, place))
        assert all(fleet.servers[key] is before[key] for key in fleet.servers.keys() & before.keys())
        found.append({server.peer.address for server in fleet.servers.values()})
    assert found == [
        {"10.0.0.1", "10.0.0.2"},
        {"10.0.0.2", "10.0.0.3"},
        {"10.0.0.2", "10.0.0.3"},
        set(),
    ]


class SlowPlace(FakePlace):
    """A name whose name server answers when `answers` is set."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.answers = asyncio.Event()
        self.asked = 0

    async def peers(self) -> set[Peer] | None:
        self.asked += 1
        await self.answers.wait()
        return await super().peers()


@on_loop
async def test_a_name_server_that_does_not_answer_delays_no_check_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmi_server.route.fleet._LOOK_UP_S", 0.01)

    fleet = Fleet([URL], None, 0.01)
    slow, other = SlowPlace(fleet), FakePlace(fleet)
    slow.site = slow.site._replace(url="http://slow.example:8000")
    slow.addresses, other.addresses = {"127.0.0.1"}, {"127.0.0.1"}
    fleet._places = cast(Any, [slow, other])
    rounds = asyncio.Semaphore(0)
    fleet.on_checked = rounds.release
    running = asyncio.create_task(fleet.run())
    for _ in range(3):
        await asyncio.wait_for(rounds.acquire(), 60)
    assert [url for url, _ in fleet.servers] == [other.site.url]
    assert slow.asked == 1, "it is asked once at a time"
    slow.answers.set()
    while len(fleet.servers) < 2 or "not asked" in list(fleet.servers.values())[1].reason:
        await asyncio.wait_for(rounds.acquire(), 60)
    running.cancel()


def test_an_address_in_digits_needs_no_name_server() -> None:
    fleet = Fleet(["http://[::1]:8000", "http://127.0.0.1:8000"], None, 1.0)
    for place in fleet._places:
        place._threads = cast(Any, None)  # nothing that could wait for one
        assert len(asyncio.run(place.peers()) or ()) == 1


def test_an_address_in_digits_is_one_server() -> None:
    fleet = Fleet(["http://127.0.0.1:8000/base/v1/"], "key", 1.0)
    assert asyncio.run(fleet._places[0].peers()) == {Peer("127.0.0.1", 8000)}
    assert fleet._places[0].site[1:] == ("127.0.0.1:8000", "/base", "key")


@on_loop
async def test_no_request_gets_the_connection_of_a_check() -> None:
    """It is closed once the answer of the check is read, which would be in the middle of the request."""

    connections, closed = set[asyncio.BaseTransport](), asyncio.Event()
    listening = await asyncio.get_running_loop().create_server(
        lambda: ListingServer(connections, closed), "127.0.0.1", 0
    )
    async with listening:
        fleet = Fleet([f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"], None, 1.0)
        await fleet._follow(fleet._places[0])
        [server] = fleet.servers.values()
        checking = asyncio.create_task(server.check())
        while not checking.done():
            assert server.connections.idle() is None
            await asyncio.sleep(0)
        assert server.models == {"m": frozenset()}
        await asyncio.wait_for(closed.wait(), 60)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://u:secret@h",
        "http://h/?x",
        "http://h\r\nx: y",
        "http://a..b",
        "http://u:secret@h:99999",
        f"ftp://u:{'secret' * 50}@h",
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Fleet([url], None, 1.0)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("reason", ["it ends", "x" * 10_000, "a\r\nb"])
@on_loop
async def test_what_a_server_says_is_one_short_line_of_the_log(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet([URL], None, 1.0)

    place = FakePlace(fleet)
    place.addresses = {"10.0.0.1"}
    await fleet._follow(cast(Any, place))
    [server] = fleet.servers.values()
    fleet.note_unreachable(server, reason)
    [line] = [record.getMessage() for record in caplog.records if "no requests" in record.getMessage()]
    assert "\n" not in line
    assert len(line) < 1000


@on_loop
async def test_the_names_of_many_models_are_one_short_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(path: str) -> tuple[int, bytes]:
        return 200, json.dumps({"data": [{"id": f"{number:03}{'m' * 200}"} for number in range(1000)]}).encode()

    server = Server(Fleet([URL], None, 1.0)._places[0].site, Peer("10.0.0.1", 8000))
    monkeypatch.setattr(server, "_get", answer)
    with caplog.at_level("INFO"):
        await server.check()
    [line] = [record.getMessage() for record in caplog.records if "ready with" in record.getMessage()]
    assert (len(server.models), line.count("... (203"), line.endswith(", ...")) == (1000, 10, True)
    assert len(line) < 3000
