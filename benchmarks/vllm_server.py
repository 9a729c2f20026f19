"""Compares this server with vLLM's own OpenAI server: the same model, the same client, the same machine, in one run.

    python -m benchmarks.vllm_server

Completions of 64 tokens, end of sequence ignored, at 1, 8, 32 and 64 connections that always have a request open;
then 300 requests of one token whose prompts of 512 tokens share the first 448. Both servers run with their defaults,
then both with the same settings of vLLM's engine. The CPU time is that of all processes of a server; what the engine
itself takes is measured without any server (`--engine`) and taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.generation import CONCURRENCIES, CORES, MODEL, NEW_TOKENS, prompts

NAME = "model"
PREFIX = "prefix of 448 of 512 tokens shared"
SHARED_TOKENS, PROMPT_TOKENS, PREFIX_REQUESTS = 448, 512, 300
# The settings of the engine that both get in the second part.
SAME = {"max_num_seqs": 64, "max_model_len": 2048, "kv_gib": 2}


# --- the load ---


@dataclass(slots=True)
class Stream:
    """What was seen of one answer; times in seconds."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


class Connection(asyncio.Protocol):
    """One connection that sends a request and reads its answer to the end, as often as it is told."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._data = bytearray()
        self._times: list[tuple[float, int]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {bytes(self._data[-300:])!r}"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._times.append((time.perf_counter(), len(self._data)))
        if self._complete() and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def ask(self, request: bytes, tokens: int) -> Stream:
        """Send `request` and return what came; AssertionError where it is not a whole answer of `tokens` tokens."""
        assert self._transport is not None
        self._data, self._times = bytearray(), []
        self._done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self._transport.write(request)
        await self._done
        assert self._data.startswith(b"HTTP/1.1 200"), bytes(self._data[:500])
        assert b'"completion_tokens":%d' % tokens in self._data, bytes(self._data[-500:])
        head = self._data.index(b"\r\n\r\n") + 4
        arrivals = [at for at, size in self._times if size > head + 8]
        return Stream(arrivals[0] - began, [b - a for a, b in pairwise(arrivals)], tokens)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _complete(self) -> bool:
        if self._data.endswith(b"0\r\n\r\n"):
            return True
        head, separator, body = self._data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2]
        return bool(separator and length) and len(body) == int(length.partition(b"\r")[0])


def request_bytes(prompt: str | list[int], tokens: int, stream: bool) -> bytes:
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def load(port: int, requests: list[bytes], connections: int, tokens: int) -> tuple[float, list[Stream]]:
    """Send all requests over so many connections; return the seconds it took and what was seen of each."""
    loop = asyncio.get_running_loop()
    waiting = iter(requests)
    streams: list[Stream] = []

    async def client() -> None:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        for request in waiting:
            streams.append(await connection.ask(request, tokens))
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    return time.perf_counter() - began, streams


# --- the servers ---


class Server:
    """A server in processes of its own, and the seconds from its start to its first 200."""

    def __init__(self, command: list[str], environment: Mapping[str, str], port: int, health: str) -> None:
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        began = time.perf_counter()
        self._process = psutil.Popen(
            command, env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment, stdout=self._log, stderr=self._log
        )
        self._wait(health)
        self.ready_s = time.perf_counter() - began

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        processes = [self._process, *self._process.children(recursive=True)]
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def _wait(self, health: str) -> None:
        request = f"GET {health} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        while self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(request)
                if b" 200 " in connection.recv(64):
                    return
            time.sleep(0.1)
        self._log.seek(0)
        raise RuntimeError(self._log.read()[-3000:].decode(errors="replace"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ours(settings: Mapping[str, Any] | None) -> Iterator[Server]:
    """This server with `rolling_batch=vllm`, and for the rest its defaults or the engine settings given."""
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / NAME
        directory.mkdir()
        options: dict[str, Any] = {"model_id": MODEL.resolve(), "rolling_batch": "vllm"}
        if settings is not None:
            options |= {
                "max_rolling_batch_size": settings["max_num_seqs"],
                "max_model_len": settings["max_model_len"],
                "kv_cache_memory_gb": settings["kv_gib"],
                "enforce_eager": "true",
            }
        lines = [f"option.{name}={value}" for name, value in options.items()]
        (directory / "serving.properties").write_text("\n".join(lines))
        port = free_port()
        command = [sys.executable, "-m", "lmi_server.cli", "serve", str(directory), "--port", str(port)]
        server = Server([*command, "--log-level", "warning"], {}, port, "/ping")
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def theirs(settings: Mapping[str, Any] | None) -> Iterator[Server]:
    """vLLM's own server with its defaults or the engine settings given, its access log off.

    The size of its KV cache is always given: its default, nine tenths of the memory, is not to be had beside others.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL.resolve())]
    command += ["--served-model-name", NAME, "--port", str(port), "--host", "127.0.0.1", "--disable-uvicorn-access-log"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(SAME["kv_gib"]), "VLLM_NO_USAGE_STATS": "1"}
    if settings is not None:
        command += ["--max-num-seqs", str(settings["max_num_seqs"]), "--max-model-len", str(settings["max_model_len"])]
        command += ["--enforce-eager"]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{CORES - 1}"
    server = Server(command, environment, port, "/health")
    try:
        yield server
    finally:
        server.stop()


SERVERS = {"ours": ours, "theirs": theirs}


# --- what is measured ---


@dataclass(frozen=True, slots=True)
class Figures:
    """One load on one server: output tokens/s, medians and 99th percentiles in milliseconds, CPU seconds used."""

    tokens_per_s: float
    ttft_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    itl_ms: float = 0.0
    itl_p99_ms: float = 0.0
    cpu_s: float = 0.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def generation(server: Server, concurrency: int, stream: bool, rounds: int) -> Figures:
    requests = [request_bytes(prompt, NEW_TOKENS, stream) for prompt in prompts(concurrency * rounds)]
    before = server.cpu_s()
    seconds, streams = await load(server.port, requests, concurrency, NEW_TOKENS)
    used = server.cpu_s() - before
    rate = sum(seen.tokens for seen in streams) / seconds
    if not stream:
        return Figures(rate, cpu_s=used)
    firsts = [1000 * seen.first for seen in streams]
    gaps = [1000 * gap for seen in streams for gap in seen.gaps]
    return Figures(
        rate, statistics.median(firsts), percentile(firsts, 0.99), statistics.median(gaps), percentile(gaps, 0.99), used
    )


async def shared_prefix(server: Server) -> Figures:
    """Requests/s of one token each, as `tokens_per_s`."""
    chance = random.Random(5)
    shared = [chance.randrange(100, 20_000) for _ in range(SHARED_TOKENS)]
    rest = PROMPT_TOKENS - SHARED_TOKENS
    requests = [
        request_bytes([*shared, *(chance.randrange(100, 20_000) for _ in range(rest))], 1, stream=False)
        for _ in range(PREFIX_REQUESTS)
    ]
    before = server.cpu_s()
    seconds, streams = await load(server.port, requests, 32, 1)
    return Figures(len(streams) / seconds, cpu_s=server.cpu_s() - before)


async def measure(server: Server, rounds: int) -> dict[str, Figures]:
    await load(server.port, [request_bytes(prompt, 8, stream=True) for prompt in prompts(8)], 8, 8)
    figures = {}
    for concurrency in CONCURRENCIES:
        for stream in (True, False):
            figures[f"{concurrency}, {'streaming' if stream else 'whole'}"] = await generation(
                server, concurrency, stream, rounds
            )
    figures[PREFIX] = await shared_prefix(server)
    return figures


def run(name: str, same: bool, rounds: int) -> dict[str, Any]:
    with SERVERS[name](SAME if same else None) as server:
        figures = uvloop.run(measure(server, rounds))
        return {"ready_s": server.ready_s, **{key: asdict(value) for key, value in figures.items()}}


def engine_cpu_s(rounds: int) -> float:
    """Return the CPU seconds that vLLM's engine takes for the largest load without any server, without texts too."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(SAME["kv_gib"]),
        "TORCH_COMPILE_DISABLE": "1",
    }
    from vllm import LLM, SamplingParams

    sizes = {name: SAME[name] for name in ("max_num_seqs", "max_model_len")}
    llm = LLM(str(MODEL), enforce_eager=True, disable_log_stats=True, **sizes)
    parameters = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate(prompts(8), parameters, use_tqdm=False)
    process = psutil.Process()
    before = sum(process.cpu_times()[:2])
    asked = prompts(max(CONCURRENCIES) * rounds)
    for first in range(0, len(asked), max(CONCURRENCIES)):
        llm.generate(asked[first : first + max(CONCURRENCIES)], parameters, use_tqdm=False)
    return sum(process.cpu_times()[:2]) - before


# --- the tables ---


def in_a_process(*arguments: str) -> Any:
    """Return what this script prints as JSON when it is run with these arguments."""
    command = [sys.executable, "-m", "benchmarks.vllm_server", *arguments]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(finished.stdout.decode().strip().rpartition("\n")[2])


def table(title: str, mine: dict[str, Any], other: dict[str, Any], aims: Mapping[str, str]) -> Table:
    shown = Table("measured", "lmi-server", "vLLM's server", "ratio", "aim", title=title)

    def row(what: str, own: float, their: float, aim: str = "", form: str = ".0f") -> None:
        shown.add_row(what, f"{own:{form}}", f"{their:{form}}", f"{own / their:.2f}", aim)

    for load_name in (name for name in mine if name != "ready_s"):
        own, their = mine[load_name], other[load_name]
        unit = "requests/s" if load_name == PREFIX else "output tokens/s"
        row(f"{load_name}, {unit}", own["tokens_per_s"], their["tokens_per_s"], aims.get(load_name, ""), ".1f")
        if own["ttft_ms"]:
            for key, name in _LATENCIES.items():
                row(f"    {name}, ms", own[key], their[key], "<= 1", ".1f")
        row("    CPU seconds", own["cpu_s"], their["cpu_s"], form=".1f")
    row("seconds to the first 200", mine["ready_s"], other["ready_s"], aims.get("ready_s", ""), ".1f")
    return shown


_LATENCIES = {
    "ttft_ms": "TTFT, median",
    "ttft_p99_ms": "TTFT, p99",
    "itl_ms": "ITL, median",
    "itl_p99_ms": "ITL, p99",
}
_AIMS = {
    "64, streaming": ">= 1.5",
    "32, streaming": ">= 1.4",
    "8, streaming": ">= 1.2",
    "1, streaming": ">= 1.1",
    "ready_s": "<= 0.5",
}
_SAME_AIMS = {"64, streaming": ">= 1.03", PREFIX: ">= 1.0"}


def report(rounds: int) -> None:
    console = Console(width=110)
    for same, aims in ((False, _AIMS), (True, _SAME_AIMS)):
        arguments = ["--rounds", str(rounds), *(["--same"] if same else [])]
        mine, other = (in_a_process("--server", name, *arguments) for name in SERVERS)
        title = "the same settings of the engine" if same else "defaults"
        console.print(table(f"SmolLM2-135M on both servers, {title}", mine, other, aims))
    engine = in_a_process("--engine", "--rounds", str(rounds))
    own, their = (figures["64, streaming"]["cpu_s"] - engine for figures in (mine, other))
    console.print(
        f"CPU seconds of everything but the engine (it alone takes {engine:.1f}), 64 streaming:"
        f" {own:.1f} against {their:.1f}, ratio {own / their:.2f} (aim <= 0.6)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=SERVERS, help="run only this one and print its figures as JSON")
    parser.add_argument("--engine", action="store_true", help="run only the engine and print its CPU seconds")
    parser.add_argument("--same", action="store_true", help="with the same engine settings")
    parser.add_argument("--rounds", type=int, default=2, help="requests per connection")
    arguments = parser.parse_args()
    if arguments.server:
        print(json.dumps(run(arguments.server, arguments.same, arguments.rounds)))
    elif arguments.engine:
        print(engine_cpu_s(arguments.rounds))
    else:
        report(arguments.rounds)


if __name__ == "__main__":
    main()
