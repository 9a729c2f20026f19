"""Measures what the host costs: the rolling batch with a runner that returns at once (benchmarks/null_runner.py).

    python -m benchmarks.host [--only engine|http] [--sampling greedy|drawn|mixed] [--cpu]

In process, microseconds of processor time per sequence and step of the engine's thread, by part. With `--cpu` logits
are those of the demo model, and each step first sweeps the caches, as one that reads weights does: what the sweep takes
does not count. Over HTTP, tokens/s of 64 streams with server and load generator on the same cores, and the processor
time of front end and worker per token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.figures import parser_of, show
from benchmarks.raw_load import Load, post
from benchmarks.servers import MODEL, Server, model_directory, started
from lmi_server.contract.generation import SamplingParameters

COUNTS = (1, 8, 64, 256)
STREAMS = 64
NEW_TOKENS = 200
ROUNDS = 5
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "drawn": [{"do_sample": True, "temperature": 0.8, "seed": 1}],
    "top_p": [{"do_sample": True, "top_p": 0.9, "top_k": 50, "seed": 1}],
    "penalties": [{"repetition_penalty": 1.1, "frequency_penalty": 0.2}],
    "mixed": [
        {},
        {"do_sample": True, "seed": 1},
        {"do_sample": True, "top_p": 0.9, "seed": 2},
        {"do_sample": True, "top_k": 20, "seed": 3},
        {"repetition_penalty": 1.1},
    ],
}


# --- the engine alone ---


class Parts:
    """Seconds by part. `of` returns a function that counts its own time, less that of parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = 0.0

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - self._inside
                self._inside = before + took

        return timed


def run_engine(
    tokenizer: Any, count: int, sampling: str, on_cpu: bool, parts: Parts | None = None
) -> tuple[float, int]:
    """Decode `count` sequences to their ends; return the seconds and the steps, without those of the prompts."""
    from benchmarks.null_runner import ON_CPU, ON_GPU, WIDTH, NullRunner, null_engine

    runner = NullRunner(count, len(tokenizer), ON_CPU if on_cpu else ON_GPU)
    engine = null_engine(tokenizer, runner, count)
    prompt = [token % WIDTH for token in tokenizer.encode("Write what a child should know about rivers")]
    kinds = SAMPLING[sampling]
    for index in range(count):
        parameters = SamplingParameters(max_new_tokens=NEW_TOKENS, ignore_eos=True, **kinds[index % len(kinds)])
        engine.add("bench", [*prompt, index + 1], parameters, "", 3, lambda output: None)
    engine.step()
    engine.step()
    with timed_parts(engine, parts) if parts is not None else contextlib.nullcontext():
        began, steps = time.thread_time() - runner.swept_s, 0
        while engine.has_work:
            engine.step()
            steps += 1
        return time.thread_time() - runner.swept_s - began, steps


@contextlib.contextmanager
def timed_parts(engine: Any, parts: Parts) -> Iterator[None]:
    """Count the time of an engine's parts. The clock itself costs a third of a microsecond a call."""
    from handlers.rolling_batch.request import Request
    from handlers.rolling_batch.requests import tokens as module

    owners = [
        (engine._scheduler, "plan", "plan"),
        (engine._scheduler, "advance", "plan"),
        (engine._runner, "laid_out", "layout"),
        (engine._runner, "_sweep", "sweep"),
        (module, "choose_tokens", "sample"),
        (Request, "accept", "tokens"),
        (engine._recorder, "end", "statistics"),
    ]
    found = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
    for owner, name, part in owners:
        setattr(owner, name, parts.of(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in found:
            setattr(owner, name, function)


def show_engine(counts: tuple[int, ...], sampling: str, on_cpu: bool) -> None:
    """Print microseconds per sequence and step: the median of several rounds, and by part of one more."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    run_engine(tokenizer, 2, sampling, on_cpu)
    rows = []
    for count in counts:
        took = [per_token(*run_engine(tokenizer, count, sampling, on_cpu), count) for _ in range(ROUNDS)]
        parts = Parts()
        seconds, steps = run_engine(tokenizer, count, sampling, on_cpu, parts)
        parts.seconds.pop("sweep")
        rest = seconds - sum(parts.seconds.values())
        named = {**parts.seconds, "rest": rest}
        shown = ", ".join(f"{part} {per_token(own, steps, count):.1f}" for part, own in named.items())
        rows.append((str(count), f"{statistics.median(took):.1f}", shown))
    title = f"The engine's thread with a null runner, {sampling}{', cold caches' * on_cpu}: us per sequence and step"
    show(("sequences", "all", "by part (with the clock's own time)"), rows, title, 150)


def per_token(seconds: float, steps: int, count: int) -> float:
    return 1e6 * seconds / steps / count


# --- over HTTP ---


def serve(directory: Path, port: int) -> None:
    """Serve the null model of `directory`: its handler is in no table, so that only benchmarks have it."""
    from frontend.server import run
    from lmi_server.configuration.resolve import inspect_model
    from lmi_server.configuration.server_settings import resolve_server
    from lmi_server.serving.models.model_store import ModelSource

    def inspect(*arguments: Any) -> Any:
        found = inspect_model(*arguments)
        return dataclasses.replace(
            found, spec=dataclasses.replace(found.spec, handler="benchmarks.null_runner:NullModelHandler")
        )

    settings, _ = resolve_server({}, {"port": port, "log_level": "warning"})
    sys.exit(run([ModelSource(str(directory), "null")], settings, {}, inspect))


def request_of(route: str, new_tokens: int) -> bytes:
    prompt = "Write what a child should know about rivers, first of all"
    if route == "invocations":
        body: dict[str, Any] = {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, "ignore_eos": True}}
    else:
        message = [{"role": "user", "content": prompt}]
        body = {"model": "null", "messages": message, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    return post(f"/{route}", {**body, "stream": True})


async def stream_rates(server: Server, route: str, streams: int, seconds: float) -> list[float]:
    """Return tokens/s, and the microseconds of front end and worker per token."""
    mark = b'"token"' if route == "invocations" else b'"content"'
    load = await Load.open(server, streams, request_of(route, 2000), True, mark)
    rates = await load.measure(server, seconds, 1.0)
    await load.close()
    return [rates.tokens, 1e6 * rates.front_end_s / rates.tokens, 1e6 * rates.workers_s / rates.tokens]


async def show_http(streams: int, seconds: float) -> None:
    lines = ("engine=Python", "option.entryPoint=djl_python.huggingface", "job_queue_size=1000")
    options = {"rolling_batch": "scheduler", "max_rolling_batch_size": streams}
    rows = []
    with model_directory(*lines, name="null", **options) as directory:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (directory / name).symlink_to((MODEL / name).resolve())
        with started(sys.executable, "-m", "benchmarks.host", "--serve", str(directory), "--port", "{port}") as server:
            server.wait_until_ready(request_of("invocations", 1))
            for route in ("invocations", "v1/chat/completions"):
                rates = [await stream_rates(server, route, streams, seconds) for _ in range(3)]
                rate, front, worker = (statistics.median(column) for column in zip(*rates, strict=True))
                rows.append((route, f"{rate:,.0f}", f"{front:.1f}", f"{worker:.1f}"))
    columns = ("API", "tokens/s", "front end, us per token", "worker, us per token (engine and event loop)")
    show(columns, rows, f"{streams} streams of a null model over HTTP, load generator on the same cores", 150)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=("engine", "http"))
    parser.add_argument("--sampling", choices=tuple(SAMPLING), default="greedy")
    parser.add_argument("--cpu", action="store_true", help="logits and caches are as on a CPU")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each rate is measured")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    if arguments.serve is not None:
        serve(arguments.serve, arguments.port)
        return
    if arguments.only != "http":
        show_engine(COUNTS, arguments.sampling, arguments.cpu)
    if arguments.only != "engine":
        uvloop.run(show_http(arguments.streams, arguments.seconds))


if __name__ == "__main__":
    main()
