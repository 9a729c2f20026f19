"""Counts the instructions that a request to the echo model takes in the front end and in its worker.

    python -m benchmarks.instructions [--stream] [CHECKOUT ...]

Other loads of the machine change times by more than a change of the code does; they hardly change this count. It counts
neither waiting for memory nor the kernel. It needs valgrind. A CHECKOUT is a directory with another version and its
.venv; without any, it is the working directory. What a process executes without requests is measured and subtracted.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.figures import parser_of, show
from benchmarks.raw_load import Load, echo
from benchmarks.servers import ECHO, Server, model_directory, stopping

CONNECTIONS = 64
WARM_S = 5
MEASURED_S = 20
_WRITTEN_S = 60
VALGRIND = ("valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no")


class Counted:
    """A process of a server whose instructions are counted; callgrind writes them to files that begin with `out`."""

    def __init__(self, pid: int, out: Path) -> None:
        self._pid = str(pid)
        self._out = out

    def _control(self, *arguments: str) -> None:
        subprocess.run(["callgrind_control", *arguments, self._pid], check=True, capture_output=True)

    async def count(self, seconds: float) -> int:
        """Return the instructions in the next `seconds`. Raises TimeoutError if callgrind does not write them."""
        before = self._written()
        self._control("--instr=on")
        await asyncio.sleep(seconds)
        self._control("--instr=off")
        self._control("--dump")
        async with asyncio.timeout(_WRITTEN_S):
            while not (written := self._written() - before):  # noqa: ASYNC110 - the process writes it at its next turn
                await asyncio.sleep(0.1)
        return sum(_total(path) for path in written)

    def _written(self) -> set[Path]:
        return {path for path in self._out.parent.glob(f"{self._out.name}.{self._pid}.*") if _total(path)}


def _total(path: Path) -> int:
    return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("totals:"))


@contextmanager
def counted_server(checkout: Path, out: Path) -> Iterator[Server]:
    """Serve the echo model by the version in `checkout`."""
    python = checkout / ".venv/bin/python"
    serve = (str(python), "-m", "lmi_server", "serve")
    with model_directory(*ECHO, name="echo", max_rolling_batch_size=256) as model:
        command = (*VALGRIND, f"--callgrind-out-file={out}.%p", *serve, str(model), "--port", "{port}")
        variables = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        with stopping(Server(*command, log=out.with_name("log"), **variables)) as server:
            server.wait_until_ready()
            yield server


async def measure(checkout: Path, stream: bool) -> tuple[float, float]:
    """Return the instructions of the front end and of the worker, for each request or streamed token."""
    with tempfile.TemporaryDirectory() as directory, counted_server(checkout, Path(directory, "counts")) as server:
        worker = next(pid for pid in server.pids() if "lmi_server.worker" in psutil.Process(pid).cmdline())
        found = []
        for pid in (server.pids()[0], worker):
            process = Counted(pid, Path(directory, "counts"))
            idle = await process.count(WARM_S) / WARM_S
            load = await Load.open(server, CONNECTIONS, echo(2000 if stream else 4, stream), stream)
            await asyncio.sleep(WARM_S)
            before = _done(load, stream)
            instructions = await process.count(MEASURED_S)
            found.append((instructions - idle * MEASURED_S) / (_done(load, stream) - before))
            await load.close()
    return found[0], found[1]


def _done(load: Load, stream: bool) -> int:
    return sum(client.tokens if stream else client.responses for client in load.clients)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stream", action="store_true", help="count for each token of streams")
    parser.add_argument("checkouts", metavar="CHECKOUT", nargs="*", type=Path, default=[Path()])
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    base: tuple[float, ...] | None = None
    for checkout in arguments.checkouts:
        found = asyncio.run(measure(checkout.resolve(), arguments.stream))
        found = (*found, sum(found))
        base = base or found
        cells = [f"{one:,.0f} ({one / first:.3f})" for one, first in zip(found, base, strict=True)]
        rows.append((str(checkout), *cells))
    what = "streamed token" if arguments.stream else "request"
    show(("checkout", "front end", "worker", "both"), rows, f"Instructions for each {what} (the first checkout is 1)")


if __name__ == "__main__":
    main()
