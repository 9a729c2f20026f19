"""Compares this server with vLLM's own OpenAI server: same model, same client, same machine, in one run.

    python -m benchmarks.vllm_server [PART ...] [--concurrency N ...] [--runs N] [--rolling-batch scheduler]

The loads are completions of 64 tokens (end of sequence ignored) at 1, 8, 32 and 64 connections that always have a
request open; and 300 requests of one token whose prompts of 512 tokens share the first 448.

- `defaults-*` run both servers without settings. vLLM's server compiles the model before it is ready and this one
  afterwards, so that the measurement waits until this one has compiled it.
- `same-*` run both with the same settings of vLLM's engine.
- `--rolling-batch scheduler` compares this project's own rolling batch in place of its vllm handler, in `same-*` with
  as many sequences and tokens.
- `cpu` subtracts the CPU time of the engine alone, measured without any server, from that of all processes of a server.

Both servers run at the same time and take turns. Between its turns a signal holds vLLM's server, because it computes
while it idles. Rates and CPU seconds are medians of the runs, latencies are those of all requests of all runs. Each
part takes a few minutes; without PART all parts run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.figures import in_turns, parser_of, run_apart, show
from benchmarks.generation import CONCURRENCIES, CORES, NEW_TOKENS, prompts
from benchmarks.load import completion, run_load
from benchmarks.servers import MODEL, PING, Server, model_directory, stopping
from lmi_server.bench.records import Record, quantile

NAME = "model"
OURS, THEIRS = "lmi-server", "vLLM's server"
SHARED_TOKENS, PROMPT_TOKENS, PREFIX_REQUESTS, PREFIX_CONNECTIONS = 448, 512, 300, 32
ROUNDS = {1: 4, 8: 3, 32: 2, 64: 2}  # requests per connection
RUNS = 3
STARTS = 3
_COMPILE_LIMIT_S = 900
_COMPILER = "handlers.vllm.compilation.background"
# The settings of the engine and of OpenMP that both servers get in the parts `same-*`.
SAME = {"max_num_seqs": 64, "max_model_len": 2048, "kv_gib": 2}
SAME_VARIABLES = {"GOMP_SPINCOUNT": "10000"}


# --- the servers ---


class LoggedServer(Server):
    """A ready server, whose log is kept until it stops. If it is `held`, it gets CPU time only within `turn`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], health: bytes, held: bool = False) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with the server
        self._held = held
        super().__init__(sys.executable, "-m", *command, log=Path(self._file.name), HF_HUB_OFFLINE="1", **variables)
        try:
            self.wait_until_ready(health)
        except BaseException:
            self.stop()
            raise

    def wait_until_compiled(self) -> None:
        """Wait until the server has compiled the model in the background, if it does so."""
        deadline = time.monotonic() + _COMPILE_LIMIT_S
        while any(_COMPILER in command_line(pid) for pid in self.pids()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the model was not compiled within {_COMPILE_LIMIT_S} seconds")
            time.sleep(1)
        time.sleep(5)  # the worker loads the code
        if b"goes on uncompiled" in Path(self._file.name).read_bytes():
            raise RuntimeError("the model was not compiled")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run inside the `with` block; if it is a held one, it is stopped before and after."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.hold()

    def hold(self) -> None:
        """Stop the server until its next turn, if it is a held one."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._held:
            self.signal(number)

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        super().stop()
        self._file.close()


def command_line(pid: int) -> list[str]:
    """Return the arguments of the process; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).cmdline())
    return []


@contextlib.contextmanager
def ours(settings: Mapping[str, Any] | None, rolling_batch: str = "vllm") -> Iterator[LoggedServer]:
    """Run this server with a rolling batch, and otherwise its defaults or the given engine settings."""
    options: dict[str, Any] = {"model_id": MODEL.resolve(), "rolling_batch": rolling_batch}
    if settings is not None:
        options |= {"max_rolling_batch_size": settings["max_num_seqs"], "max_model_len": settings["max_model_len"]}
        if rolling_batch == "vllm":
            options |= {"kv_cache_memory_gb": settings["kv_gib"], "compilation": "start"}
    with model_directory(name=NAME, **options) as directory:
        command = ("lmi_server", "serve", str(directory), "--port", "{port}", "--log-level", "warning")
        with stopping(LoggedServer(command, SAME_VARIABLES if settings else {}, PING)) as server:
            yield server


@contextlib.contextmanager
def theirs(settings: Mapping[str, Any] | None) -> Iterator[LoggedServer]:
    """Run vLLM's own server with its defaults or the given engine settings, and without its access log.

    The size of its KV cache is always set: the default is nine tenths of the memory, which the other server needs too.
    """
    command = ["vllm.entrypoints.openai.api_server", "--model", str(MODEL.resolve()), "--served-model-name", NAME]
    command += ["--port", "{port}", "--host", "127.0.0.1", "--disable-uvicorn-access-log"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": str(SAME["kv_gib"]), "VLLM_NO_USAGE_STATS": "1"}
    if settings is not None:
        command += ["--max-num-seqs", str(settings["max_num_seqs"]), "--max-model-len", str(settings["max_model_len"])]
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}", **SAME_VARIABLES}
    with stopping(LoggedServer(command, variables, PING.replace(b"/ping", b"/health"), held=True)) as server:
        yield server


Start = Callable[[Mapping[str, Any] | None], AbstractContextManager[LoggedServer]]


def servers_of(rolling_batch: str) -> dict[str, Start]:
    """Return how the two servers are started."""
    return {OURS: functools.partial(ours, rolling_batch=rolling_batch), THEIRS: theirs}


# --- what is measured ---


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind: `connections` at once, streamed or whole, of 64 tokens or with a shared prefix."""

    connections: int
    stream: bool = False
    shares_prefix: bool = False

    def requests(self, run: int) -> list[dict[str, Any]]:
        """Return the requests of one run; those with a shared prefix share it with no other run."""
        if not self.shares_prefix:
            asked = prompts(self.connections * ROUNDS.get(self.connections, 2))
            return [completion(NAME, prompt, NEW_TOKENS, self.stream) for prompt in asked]
        chance = random.Random(run)
        shared = [chance.randrange(100, 20_000) for _ in range(SHARED_TOKENS)]
        rest = PROMPT_TOKENS - SHARED_TOKENS
        asked_ids = ([*shared, *(chance.randrange(100, 20_000) for _ in range(rest))] for _ in range(PREFIX_REQUESTS))
        return [completion(NAME, ids, 1, stream=False) for ids in asked_ids]


@dataclass(slots=True)
class Figures:
    """The measurements of one server under one load: tokens/s and CPU seconds per run, latencies of all requests."""

    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)

    def latencies(self) -> Mapping[str, float]:
        """Return medians and 99th percentiles in milliseconds."""
        firsts = [1000 * record.ttft for record in self.records if record.ttft is not None]
        gaps = [1000 * gap for record in self.records for gap in record.gaps]
        return {
            "TTFT, median": statistics.median(firsts),
            "TTFT, p99": quantile(sorted(firsts), 0.99),
            "ITL, median": statistics.median(gaps),
            "ITL, p99": quantile(sorted(gaps), 0.99),
        }


async def measure(server: LoggedServer, load: Load, run: int, figures: Figures) -> None:
    """Run the load once and add the measurements to `figures`."""
    tokens = 1 if load.shares_prefix else NEW_TOKENS
    before = sum(server.cpu_s())
    seconds, records = await run_load(server.port, load.requests(run), load.connections, tokens)
    figures.cpu_s.append(sum(server.cpu_s()) - before)
    figures.rates.append(sum(record.output_tokens for record in records) / seconds)
    figures.records += records


def compare(servers: Mapping[str, LoggedServer], load: Load, runs: int) -> dict[str, Figures]:
    """Run the load on both servers in turns; the one that goes first changes with each run."""
    figures = {name: Figures() for name in servers}
    numbers = {name: itertools.count() for name in servers}

    def run(name: str) -> None:
        with servers[name].turn():
            uvloop.run(measure(servers[name], load, next(numbers[name]), figures[name]))

    in_turns(runs, {name: functools.partial(run, name) for name in servers}, warm=False)
    return figures


async def warm(server: LoggedServer) -> None:
    """Run every code path once, with as many requests at once as will come later."""
    for stream in (True, False):
        await run_load(server.port, [completion(NAME, text, 4, stream) for text in prompts(64)], 64, 4)


@contextlib.contextmanager
def both(starts: Mapping[str, Start], settings: Mapping[str, Any] | None) -> Iterator[dict[str, LoggedServer]]:
    """Start both servers, warm them up, and print the CPU time that each takes while it idles."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(start(settings)) for name, start in starts.items()}
        for server in servers.values():
            server.wait_until_compiled()
            uvloop.run(warm(server))
        before = {name: sum(server.cpu_s()) for name, server in servers.items()}
        time.sleep(2)
        idle = ", ".join(f"{name} {(sum(server.cpu_s()) - before[name]) / 2:.1%}" for name, server in servers.items())
        ready = ", ".join(f"{name} {server.ready_s:.1f}" for name, server in servers.items())
        print(f"Seconds to the first 200: {ready}. CPU of a core while idle: {idle}")
        for server in servers.values():
            server.hold()
        yield servers


def engine_runs(runs: int) -> dict[str, list[float]]:
    """Return CPU seconds and tokens/s of vLLM's engine for the largest load, without a server and without texts."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(SAME["kv_gib"]),
        **SAME_VARIABLES,
    }
    from vllm import LLM, SamplingParams

    sizes = {name: SAME[name] for name in ("max_num_seqs", "max_model_len")}
    llm = LLM(str(MODEL), disable_log_stats=True, **sizes)
    parameters = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    most = max(CONCURRENCIES)
    asked = prompts(most * ROUNDS[most])
    llm.generate(asked[:most], parameters, use_tqdm=False)
    process = psutil.Process()
    figures: dict[str, list[float]] = {"cpu_s": [], "rates": []}
    for _ in range(runs):
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        for first in range(0, len(asked), most):
            llm.generate(asked[first : first + most], parameters, use_tqdm=False)
        figures["cpu_s"].append(sum(process.cpu_times()[:2]) - before)
        figures["rates"].append(len(asked) * NEW_TOKENS / (time.perf_counter() - began))
    return figures


# --- the parts ---


# What comes behind "same" or "defaults" is the kind of load.
PARTS = (
    *(f"{settings}-{kind}" for settings in ("defaults", "same") for kind in ("streaming", "whole", "prefix")),
    "cpu",
)
READY = "ready"
Aims = Mapping[tuple[str, int], float]  # by part and connections: the least ratio of the rates
_AIMS: Mapping[str, Aims] = {
    "vllm": {
        ("defaults-streaming", 1): 1.1,
        ("defaults-streaming", 8): 1.2,
        ("defaults-streaming", 32): 1.4,
        ("defaults-streaming", 64): 1.5,
        ("same-streaming", 64): 1.03,
        **{(f"{settings}-prefix", PREFIX_CONNECTIONS): 1.0 for settings in ("defaults", "same")},
    },
    "scheduler": {
        ("same-streaming", 1): 2.0,
        ("same-streaming", 8): 2.0,
        ("same-streaming", 32): 1.5,
        ("same-streaming", 64): 1.5,
    },
}
"""By the rolling batch of this server."""


class Comparison:
    """A table with the figures of both servers."""

    def __init__(self, title: str) -> None:
        self._title = f"SmolLM2-135M on both servers, {title}"
        self._rows: list[tuple[str, ...]] = []

    def show(self) -> None:
        show(("measured", OURS, THEIRS, "ratio", "aim"), self._rows, self._title, 110)

    def add(self, what: str, own: float, their: float, aim: float | None = None, at_most: bool = False) -> None:
        """Add a row; the ratio should be at least `aim`, or at most."""
        ratio, verdict = own / their, ""
        if aim is not None:
            missed = ratio > aim if at_most else ratio < aim
            verdict = f"{'<=' if at_most else '>='} {aim:g}{', missed' if missed else ''}"
        self._rows.append((what, f"{own:.1f}", f"{their:.1f}", f"{ratio:.2f}", verdict))

    def add_figures(self, part: str, load: Load, figures: Mapping[str, Figures], aims: Aims) -> None:
        own, their = figures[OURS], figures[THEIRS]
        unit = "requests/s" if load.shares_prefix else "output tokens/s"
        self.add(f"{load.connections} at once, {unit}", own.rate, their.rate, aims.get((part, load.connections)))
        if load.stream:
            strict = 1.0 if part.startswith("defaults") else None
            other = their.latencies()
            for name, value in own.latencies().items():
                self.add(f"    {name}, ms", value, other[name], strict, at_most=True)
        self.add("    CPU seconds", own.cpu, their.cpu)


def run_part(
    name: str, servers: Mapping[str, LoggedServer], aims: Aims, concurrencies: Sequence[int], runs: int
) -> None:
    """Run one part on both servers and print its table."""
    kind, loads = name.rpartition("-")[2], list[Load]()
    comparison = Comparison(name)
    if kind == "cpu":
        _add_cpu(comparison, compare(servers, Load(max(CONCURRENCIES), stream=True), runs), runs)
    elif kind == "prefix":
        loads = [Load(PREFIX_CONNECTIONS, shares_prefix=True)]
    else:
        loads = [Load(connections, stream=kind == "streaming") for connections in concurrencies]
    for load in loads:
        comparison.add_figures(name, load, compare(servers, load, runs), aims)
    comparison.show()


def _add_cpu(comparison: Comparison, figures: Mapping[str, Figures], runs: int) -> None:
    alone = run_apart("benchmarks.vllm_server", "--engine", "--runs", str(runs))
    engine = statistics.median(alone["cpu_s"])
    own, their = figures[OURS], figures[THEIRS]
    print(f"The engine alone: {engine:.1f} CPU seconds, {statistics.median(alone['rates']):.0f} tokens/s")
    comparison.add("64 at once, output tokens/s", own.rate, their.rate)
    comparison.add("    CPU seconds", own.cpu, their.cpu)
    comparison.add("    CPU seconds, all but the engine", own.cpu - engine, their.cpu - engine, 0.6, at_most=True)


def ready(starts: Mapping[str, Start]) -> None:
    """Start both servers in turns with their defaults; print a table of the seconds to the first status 200."""

    def start(name: str) -> float:
        with starts[name](None) as server:
            return server.ready_s

    seconds = in_turns(STARTS, {name: functools.partial(start, name) for name in starts}, warm=False)
    comparison = Comparison(READY)
    own, their = (statistics.median(seconds[name]) for name in (OURS, THEIRS))
    comparison.add("seconds from the start to the first 200", own, their, 0.5, at_most=True)
    comparison.show()


def report(rolling_batch: str, parts: Sequence[str], concurrencies: Sequence[int], runs: int) -> None:
    starts = servers_of(rolling_batch)
    if READY in parts:
        ready(starts)
    loads = [name for name in PARTS if name in parts]
    for defaults, names in itertools.groupby(loads, lambda name: name.startswith("defaults")):
        with both(starts, None if defaults else SAME) as servers:
            for name in names:
                run_part(name, servers, _AIMS[rolling_batch], concurrencies, runs)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join([READY, *PARTS])} (default: all)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES, help="only these")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of each load on each server")
    parser.add_argument("--rolling-batch", choices=_AIMS, default="vllm", help="of this server")
    parser.add_argument("--engine", action="store_true", help="run only the engine and print its figures as JSON")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # so that `finally` ends the servers: they have their own Unix sessions
    unknown = set(arguments.parts) - {READY, *PARTS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such part; there are {', '.join([READY, *PARTS])}")
    if arguments.engine:
        print(json.dumps(engine_runs(arguments.runs)))
    else:
        report(arguments.rolling_batch, arguments.parts or [READY, *PARTS], arguments.concurrency, arguments.runs)


if __name__ == "__main__":
    main()
