"""Measures a model.py that only echoes: in this server and in others, under the same load in the same run.

    python -m benchmarks.own_code

Prints a table. The other servers are those of benchmarks/peers; the first run installs each in its own environment. If
one cannot be installed or started, the reason stands below the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.peers import PEERS, Peer
from benchmarks.relay import Client, Load, Rates, Server, UnavailableError, measure

CONNECTIONS = 64
CHUNKS = 500
WARM_S = 2  # a server in Java compiles its hot code meanwhile

MODEL = f"""
from djl_python import Input, Output

def handle(inputs: Input):
    if inputs.is_empty():
        return None
    if inputs.get_property("x-stream"):
        return Output().add_stream_content(({{"token": index}} for index in range({CHUNKS})))
    return Output().add_as_json(inputs.get_as_json())
"""


class Row(NamedTuple):
    what: str
    stream: bool
    aim: str


ROWS = (
    Row("requests/s, 64 connections, 1 KB", False, ">= 5,000, 4x"),
    Row("chunks/s, 64 streams of 500", True, ">= 47,000, 10x LitServe"),
)


class Contender(Server):
    """A server under test; `path` is the path that it serves."""

    def __init__(self, path: str, *command: str, log: Path | None = None) -> None:
        self.path = path
        super().__init__(*command, log=log)

    def request(self, stream: bool) -> bytes:
        body = json.dumps({"data": "x" * 1010}).encode()
        header = f"x-stream: {CHUNKS}\r\n" if stream else ""
        head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{header}"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def ours(directory: Path) -> Iterator[Contender]:
    model = directory / "echo"
    model.mkdir()
    (model / "model.py").write_text(MODEL)
    server = Contender(
        "/invocations", sys.executable, "-m", "benchmarks.relay", "--port", "{port}", "--serve", str(model)
    )
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def theirs(peer: Peer, directory: Path, stream: bool) -> Iterator[Contender]:
    """Start `peer`. Raises UnavailableError with the last line that it printed."""
    log = directory / "log"
    command = (str(peer.python()), str(peer.script), "{port}", str(directory), str(CHUNKS if stream else 0))
    server = Contender(peer.path, *command, log=log)
    try:
        yield server
    except UnavailableError as error:
        printed = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise UnavailableError(f"{error}; the last that it printed: {printed[-1]}") from error
    finally:
        server.stop()


async def rates(server: Contender, stream: bool, seconds: float) -> Rates:
    request = server.request(stream)
    await server.ready(request)
    loop = asyncio.get_running_loop()
    clients = [Client(request, stream) for _ in range(CONNECTIONS)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", server.port)  # type: ignore[misc]
    load = Load(clients)
    try:
        await asyncio.sleep(WARM_S)
        return await measure(server, load, seconds)
    finally:
        await load.close()


async def figure(contender: contextlib.AbstractContextManager[Contender], row: Row, seconds: float) -> float:
    """Return the rate for `row`. Raises UnavailableError if the server gave no answer."""
    with contender as server:
        try:
            measured = await rates(server, row.stream, seconds)
        except OSError as error:  # its port or its processes are gone
            raise UnavailableError(f"it failed under load: {error}") from error
        rate = measured.tokens if row.stream else measured.requests
        if not rate:
            raise UnavailableError("no answer came while it was measured")
        return rate


async def bench(seconds: float) -> None:
    names = [peer.name for peer in PEERS]
    table = Table("measured", "lmi-server", *names, "to the best", "aim", title="Code of one's own on this machine")
    missing = {}
    for row in ROWS:
        with tempfile.TemporaryDirectory() as directory:
            mine = await figure(ours(Path(directory)), row, seconds)
        rates_of: dict[str, float] = {}
        for peer in PEERS:
            # A process that a server left behind may still write while the directory is removed.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
                try:
                    rates_of[peer.name] = await figure(theirs(peer, Path(directory), row.stream), row, seconds)
                except UnavailableError as error:
                    missing[f"{peer.name}, {row.what}"] = str(error)
        cells = [f"{rates_of[name]:,.0f}" if name in rates_of else "none" for name in names]
        ratio = f"{mine / max(rates_of.values()):.1f}" if rates_of else ""
        table.add_row(row.what, f"{mine:,.0f}", *cells, ratio, row.aim)
    console = Console(width=130)
    console.print(table)
    for what, reason in missing.items():
        console.print(f"{what}: {reason}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_code", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each figure is measured")
    uvloop.run(bench(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
