"""Measures a model.py that only echoes: in this server and in others, under the same load in the same run.

    python -m benchmarks.own_code

Prints a table. The other servers are those of benchmarks/peers; the first run installs each in its own environment. If
one cannot be installed or started, the reason stands below the table.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.figures import parser_of, show
from benchmarks.peers import PEERS, Peer
from benchmarks.raw_load import post, rates
from benchmarks.servers import Server, UnavailableError, serving, started

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


@contextlib.contextmanager
def ours(stream: bool) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "model.py").write_text(MODEL)
        with serving(Path(directory)) as server:
            yield server


@contextlib.contextmanager
def theirs(peer: Peer, stream: bool) -> Iterator[Server]:
    # A process that a server left behind may still write while the directory is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = (str(peer.python()), str(peer.script), "{port}", directory, str(CHUNKS if stream else 0))
        with started(*command, log=Path(directory, "log")) as server:
            yield server


async def figure(start: Callable[[bool], AbstractContextManager[Server]], path: str, row: Row, seconds: float) -> float:
    """Return the rate for `row` at this path. Raises UnavailableError if the server does not start, or answer."""
    headers = (f"x-stream: {CHUNKS}",) if row.stream else ()
    request = post(path, {"data": "x" * 1010}, *headers)
    with start(row.stream) as server:
        server.wait_until_ready(request, 60)
        try:
            measured = await rates(server, CONNECTIONS, request, row.stream, seconds, WARM_S)
        except OSError as error:  # its port or its processes are gone
            raise UnavailableError(f"it failed under load: {error}") from error
    rate = measured.tokens if row.stream else measured.requests
    if not rate:
        raise UnavailableError("no answer came while it was measured")
    return rate


async def bench(seconds: float) -> None:
    rows, missing = [], []
    for row in ROWS:
        mine = await figure(ours, "/invocations", row, seconds)
        found: dict[str, float] = {}
        for peer in PEERS:
            try:
                found[peer.name] = await figure(partial(theirs, peer), peer.path, row, seconds)
            except UnavailableError as error:
                missing.append(f"{peer.name}, {row.what}: {error}")
        cells = [f"{found[peer.name]:,.0f}" if peer.name in found else "none" for peer in PEERS]
        ratio = f"{mine / max(found.values()):.1f}" if found else ""
        rows.append((row.what, f"{mine:,.0f}", *cells, ratio, row.aim))
    columns = ("measured", "lmi-server", *(peer.name for peer in PEERS), "to the best", "aim")
    show(columns, rows, "Code of one's own on this machine", 130)
    print(*missing, sep="\n")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each figure is measured")
    uvloop.run(bench(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
