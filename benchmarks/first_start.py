"""Measures the first start of a model on a machine, which compiles kernels, and the start after it.

    python -m benchmarks.first_start [--model DIR] [--kinds bf16,q8_0,q4_0] [--turns 3]

Each turn begins with an empty folder for compiled kernels, which both starts share. Seconds are from the start of the
server to the first /ping that is answered with 200, and to the first token of a request behind it. Processor seconds
are of all its processes until then: they depend little on what else the machine does.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import parser_of, show
from benchmarks.raw_load import PROMPT, TOKEN, post
from benchmarks.servers import MODEL, Server, UnavailableError, started
from lmi_server.processes.usage import measure_usage

KINDS = ("bf16", "q8_0", "q4_0")
_REQUEST = post("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}, "stream": True})


class Start(NamedTuple):
    """Seconds of one start."""

    ready: float
    first_token: float
    processor: float


def start(model: Path, kind: str, kernels: str) -> Start:
    """Start a server that keeps compiled kernels in a folder, and ask it for a token."""
    quantize = {} if kind == "bf16" else {"OPTION_QUANTIZE": kind}
    command = ("-m", "lmi_server", "serve", str(model), "--port", "{port}", "--log-level", "warning")
    variables = {"OPTION_DTYPE": "bf16", **quantize, "NUMBA_CACHE_DIR": kernels}
    with started(sys.executable, *command, **variables) as server:
        server.wait_until_ready()
        took = first_token(server)
        return Start(server.ready_s, server.ready_s + took, measure_usage(server.pids()[0]).cpu_s)


def first_token(server: Server) -> float:
    """Return the seconds to the first token of a request."""
    began, received = time.perf_counter(), b""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(_REQUEST)
        while TOKEN not in received:
            more = connection.recv(65536)
            if not more:
                raise UnavailableError(f"the server ended the answer without a token: {received!r}")
            received += more
    return time.perf_counter() - began


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[Start]] = defaultdict(list)
    for _ in range(options.turns):
        for kind in options.kinds.split(","):
            with tempfile.TemporaryDirectory() as kernels:
                for which in ("first", "later"):
                    found[kind, which].append(start(options.model, kind, kernels))
    rows = [
        (kind, which, *(f"{statistics.median(column):.1f}" for column in zip(*starts, strict=True)))
        for (kind, which), starts in found.items()
    ]
    show(("weights", "start", "ready, s", "first token, s", "processor, s"), rows, "Medians")


if __name__ == "__main__":
    main()
