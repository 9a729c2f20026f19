"""A server in the place of a worker: whatever becomes of the connection, the request ends once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from lmi_server.contract.protocol import CANCELLED, RECALLED, Cancel, Error, Frame, Input, Submit
from lmi_server.route.backend import Backend, Site
from lmi_server.route.connection import Connection, Connections, Peer

SITE = Site("http://x", "x", "", None)
REQUEST = Input("completions", {}, [("data", b"{}")])


class LostConnections(Connections):
    """Opens connections that are lost before anything can be sent."""

    async def open(self) -> Connection:
        return Connection(self)


class SlowConnections(Connections):
    """Opens none."""

    async def open(self) -> Connection:
        await asyncio.sleep(3600)
        raise AssertionError


def ends(connections: Connections, *messages: Any) -> list[Frame]:
    """Return what a backend with these connections answers to the messages."""

    async def run() -> list[Frame]:
        items: list[Frame] = []
        ended = asyncio.Event()

        def take(_: Backend, more: list[Frame]) -> None:
            items.extend(more)
            ended.set()

        backend = Backend(
            "m@x",
            SITE,
            connections,
            {"completions": "/v1/completions"},
            take,
            lambda reason: None,
            lambda key, tokens: None,
        )
        for message in messages:
            backend.send(message)
        await asyncio.wait_for(ended.wait(), 60)
        await asyncio.sleep(0.01)  # for what must not follow
        return items

    return asyncio.run(run())


def test_an_error_of_the_router_ends_the_request() -> None:
    [item] = ends(LostConnections(Peer("127.0.0.1", 1)), Submit(1, REQUEST))
    assert isinstance(item, Error)
    assert item.kind == "UpstreamError"


def test_a_client_that_leaves_while_a_connection_is_opened() -> None:
    [item] = ends(SlowConnections(Peer("127.0.0.1", 1)), Submit(1, REQUEST), Cancel(1), Cancel(1))
    assert isinstance(item, Error)
    assert item.kind == CANCELLED


def test_a_server_that_refuses_connections_gives_the_request_back() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        [item] = ends(Connections(Peer("127.0.0.1", port)), Submit(1, REQUEST))
    assert isinstance(item, Error)
    assert item.kind == RECALLED
