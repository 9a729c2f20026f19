"""Measures code of one's own that only echoes: here, and in LitServe, with the same load in the same run.

    python -m benchmarks.own_code [--litserve PYTHON]

PYTHON is an interpreter that has litserve (`make bench` makes one). Prints a table.
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

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.relay import Client, Load, Rates, Server, measure

CONNECTIONS = 64
CHUNKS = 500
LITSERVE_PYTHON = Path(__file__).parent.parent / ".venv" / "litserve" / "bin" / "python"

MODEL = f"""
from djl_python import Input, Output

def handle(inputs: Input):
    if inputs.is_empty():
        return None
    if inputs.get_property("x-stream"):
        return Output().add_stream_content(({{"token": index}} for index in range({CHUNKS})))
    return Output().add_as_json(inputs.get_as_json())
"""

LITSERVE = f"""
import sys
import litserve

class Echo(litserve.LitAPI):
    def setup(self, device):
        pass

    def predict(self, request):
        return request

class Stream(litserve.LitAPI):
    def setup(self, device):
        pass

    def predict(self, request):
        for index in range({CHUNKS}):
            yield {{"token": index}}

    def encode_response(self, output):
        for item in output:
            yield item

if __name__ == "__main__":
    api = Stream(stream=True) if sys.argv[2] == "stream" else Echo()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
"""


class Contender(Server):
    """A server under test; `path` is where it takes requests."""

    def __init__(self, path: str, *command: str) -> None:
        self.path = path
        super().__init__(*command)

    def request(self, stream: bool) -> bytes:
        body = json.dumps({"data": "x" * 1010}).encode()
        header = "x-stream: 1\r\n" if stream else ""
        head = f"POST {self.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{header}"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def ours(directory: Path) -> Iterator[Contender]:
    model = directory / "echo"
    model.mkdir()
    (model / "model.py").write_text(MODEL)
    yield from _running(
        Contender("/invocations", sys.executable, "-m", "benchmarks.relay", "--port", "{port}", "--serve", str(model))
    )


@contextlib.contextmanager
def litserve(directory: Path, python: Path, stream: bool) -> Iterator[Contender]:
    script = directory / "echo_litserve.py"
    script.write_text(LITSERVE)
    yield from _running(Contender("/predict", str(python), str(script), "{port}", "stream" if stream else "whole"))


def _running(server: Contender) -> Iterator[Contender]:
    try:
        yield server
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
        return await measure(server, load, seconds)
    finally:
        await load.close()


async def bench(python: Path | None, seconds: float) -> None:
    table = Table("measured", "lmi-server", "LitServe", "ratio", "aim", title="Code of one's own on this machine")
    rows = (
        (False, "requests/s, 64 connections, 1 KB", "requests", ">= 5,000, 4x"),
        (True, "chunks/s, 64 streams of 500", "tokens", ">= 47,000, 10x"),
    )
    for stream, what, figure, aim in rows:
        with tempfile.TemporaryDirectory() as parent:
            with ours(Path(parent)) as server:
                mine = getattr(await rates(server, stream, seconds), figure)
            cells = ["not installed", ""]
            if python is not None:
                with litserve(Path(parent), python, stream) as server:
                    theirs = getattr(await rates(server, stream, seconds), figure)
                cells = [f"{theirs:,.0f}", f"{mine / theirs:.1f}"]
        table.add_row(what, f"{mine:,.0f}", *cells, aim)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_code", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each figure is measured")
    parser.add_argument("--litserve", type=Path, default=LITSERVE_PYTHON, help="an interpreter that has litserve")
    arguments = parser.parse_args()
    uvloop.run(bench(arguments.litserve if arguments.litserve.exists() else None, arguments.seconds))


if __name__ == "__main__":
    main()
