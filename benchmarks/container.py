"""Compares the server in a container with the same server outside: seconds to the first 200 of /ping, tokens/s.

    python -m benchmarks.container --image lmi-server [--docker podman] [--docker-args="--network host"] [--turns N]

The image is that of `make image`, from the same tree; both serve the demo model with its own settings. The starts
alternate, and the first of each is not counted: it reads the files of the container or of the environment from disk.
For the rates both servers are up at the same time and take short turns at 1 and at 32 requests, whoever went second
going first in the next pair. A ratio is the median of those of the pairs, which drift of the machine's speed does not
touch; beside it stand the lower and the upper quartile. Exits with 1 if a ratio misses its aim.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import httpx

from benchmarks.figures import in_turns, parser_of, ratios, show
from benchmarks.generation import NEW_TOKENS, prompts
from benchmarks.load import completion, tokens_per_second
from benchmarks.servers import MODEL, is_answered, serving
from lmi_server.machine.ports import free_port

INSIDE, OUTSIDE = "container", "outside"
ROUNDS = {1: 3, 32: 2}  # requests per connection in a turn
SLOWEST_START, SLOWEST_RATE = 1.5, 0.97
_START_LIMIT_S = 600
_POLL_S = 0.02


class Running(NamedTuple):
    """A server that answers 200 on /ping: its port, and the seconds from its start to that answer."""

    port: int
    ready_s: float


Start = Callable[[], AbstractContextManager[Running]]


def main() -> int:
    """Run the starts and the turns, print a table, and return the exit code."""
    asked = _arguments()
    docker, arguments = shlex.split(asked.docker), shlex.split(asked.docker_args)
    servers: dict[str, Start] = {
        INSIDE: lambda: _container(docker, asked.image, arguments),
        OUTSIDE: _outside,
    }
    starts = in_turns(asked.starts, {name: partial(_ready_s, start) for name, start in servers.items()})
    rows = [_row("seconds to the first 200", starts, lambda ratio: ratio <= SLOWEST_START, "<= 1.5")]
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(start()).port for name, start in servers.items()}
        for connections in ROUNDS:
            rates = in_turns(asked.turns, {name: partial(_rate, port, connections) for name, port in ports.items()})
            what = f"{connections} at once, tokens/s"
            rows.append(_row(what, rates, lambda ratio: ratio >= SLOWEST_RATE, ">= 0.97"))
    columns = ("measured", INSIDE, OUTSIDE, "ratio", "quartiles", "aim")
    show(columns, rows, "The demo model, in a container", 110)
    return int(any(row[-1].endswith("missed") for row in rows))


def _ready_s(start: Start) -> float:
    with start() as server:
        return server.ready_s


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--image", default="lmi-server", help="image of the target cpu")
    parser.add_argument("--docker", default="docker", help="the command that runs containers")
    parser.add_argument("--docker-args", default="", help="further arguments of its `run`")
    parser.add_argument("--starts", type=int, default=5, help="starts of each that count")
    parser.add_argument("--turns", type=int, default=12, help="turns of each at each number of requests")
    return parser.parse_args()


@contextlib.contextmanager
def _container(docker: list[str], image: str, arguments: list[str]) -> Iterator[Running]:
    """Run a container as the documents say it, on a free port of this machine."""
    port = free_port(None)
    published = [] if "--network host" in " ".join(arguments) else ["--publish", f"127.0.0.1:{port}:8080"]
    inside = ["--env", f"SERVING_PORT={port}"] if not published else []
    volume = ["--volume", f"{MODEL.resolve()}:/opt/ml/model:ro"]
    command = [*docker, "run", "--detach", "--no-healthcheck", *published, *inside, *volume, *arguments, image, "serve"]
    began = time.perf_counter()
    name = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    try:
        while not is_answered(port):
            if time.perf_counter() - began > _START_LIMIT_S:
                raise TimeoutError(f"no 200 on port {port} in {_START_LIMIT_S} s: see the log of the container")
            time.sleep(_POLL_S)
        yield Running(port, time.perf_counter() - began)
    finally:
        subprocess.run([*docker, "stop", "-t", "30", name], stdout=subprocess.DEVNULL, check=False)
        subprocess.run([*docker, "rm", "--force", "--volumes", name], stdout=subprocess.DEVNULL, check=True)


@contextlib.contextmanager
def _outside() -> Iterator[Running]:
    """Run the server of this environment, as a process of this machine."""
    with serving(MODEL.resolve()) as server:
        yield Running(server.port, server.ready_s)


def _rate(port: int, connections: int) -> float:
    """Return tokens/s of streamed completions over connections that always have a request open."""
    model = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"]
    asked = prompts(connections * ROUNDS[connections])
    requests = [completion(model, prompt, NEW_TOKENS, stream=True) for prompt in asked]
    return tokens_per_second(port, requests, connections, NEW_TOKENS)


def _row(what: str, found: dict[str, list[float]], reached: Callable[[float], bool], aim: str) -> tuple[str, ...]:
    """Return a row, which says whether the ratio reaches its aim."""
    ratio, lower, upper = ratios(found[INSIDE], found[OUTSIDE])
    medians = [f"{statistics.median(found[name]):.2f}" for name in (INSIDE, OUTSIDE)]
    verdict = aim if reached(ratio) else f"{aim}, missed"
    return what, *medians, f"{ratio:.3f}", f"{lower:.3f} to {upper:.3f}", verdict


if __name__ == "__main__":
    sys.exit(main())
