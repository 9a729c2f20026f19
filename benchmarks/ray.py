"""Measures what a cluster of Ray serves through this project's front end, beside plain Ray Serve and one machine.

    python -m benchmarks.ray [--model DIR] [--only-generation | --ray-serve-llm]

Every pair is measured in one run on the same machine, one after the other. Without --model, generation and prefixes are
left out; with it, `--only-generation --threads N` compares two replicas with two workers of `lmi-server serve`, each of
them with N threads, and nothing else. Needs the extra `ray`. Prints a table.

`--ray-serve-llm` compares generation by one replica of vLLM with Ray Serve LLM (`ray.serve.llm`), which serves the same
vLLM on the CPU. It needs vLLM for CPUs, and pyarrow, which the extra does not bring: without it Ray 2.60 prints
"ModuleNotFoundError: No module named 'pyarrow'". With Ray's default share of the memory, vLLM ends with "ValueError:
Available memory on node 0 (15.52/23.54 GiB) on startup is less than desired CPU memory utilization (0.92, 21.66 GiB)".
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.figures import parser_of, show
from benchmarks.load import CHAT, run_load
from benchmarks.raw_load import echo as echo_request
from benchmarks.raw_load import post, rates
from benchmarks.servers import Server, model_directory, started

CHUNKS = 2000
PREFIXES, QUESTIONS = 3, 8  # of the measurement of prefixes, which has as many replicas as prefixes
Rows = list[tuple[str, ...]]


@contextlib.contextmanager
def peer(script: str, argument: object) -> Iterator[Server]:
    """Run a script of benchmarks/peers with its last argument."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(__file__).parent / "peers" / script)
        with started(sys.executable, path, "{port}", directory, str(argument)) as server:
            yield server


@contextlib.contextmanager
def serving_model(lines: list[str], *command: str) -> Iterator[Server]:
    with model_directory(*lines) as directory:
        options = (str(directory), "--host", "127.0.0.1", "--port", "{port}")
        with started(sys.executable, "-m", "lmi_server", *command, *options) as server:
            yield server


def cluster(lines: list[str]) -> contextlib.AbstractContextManager[Server]:
    return serving_model(lines, "ray", "deploy")


def one_machine(lines: list[str]) -> contextlib.AbstractContextManager[Server]:
    return serving_model(lines, "serve")


def echo(workers: int) -> list[str]:
    return ["option.entryPoint=djl_python.echo", "option.max_rolling_batch_size=256", f"minWorkers={workers}"]


def generating(model: Path, workers: int, threads: int) -> list[str]:
    lines = ["engine=Python", "option.entryPoint=djl_python.huggingface", "option.rolling_batch=scheduler"]
    lines += [f"option.threads={threads}", f"option.model_id={model}", "option.dtype=bf16"]
    return [*lines, f"minWorkers={workers}", f"maxWorkers={workers}"]


def generating_by_vllm(model: Path) -> list[str]:
    lines = ["engine=Python", "option.rolling_batch=vllm", f"option.model_id={model}", "option.dtype=bf16"]
    return [*lines, "option.max_model_len=512", "option.gpu_memory_utilization=0.1", "minWorkers=1", "maxWorkers=1"]


# --- echo ---


async def relays(seconds: float) -> Rows:
    found = {}
    for count in (0, CHUNKS):
        request = echo_request(CHUNKS, bool(count))
        with peer("ray_serve_echo.py", count) as server:
            server.wait_until_ready(request)
            found["ray", count] = await rates(server, 16, request, bool(count), seconds)
    with cluster(echo(1)) as ours:
        ours.wait_until_ready(echo_request(1, stream=False))
        found["ours", 0] = await rates(ours, 16, echo_request(4, stream=False), False, seconds)
        found["ours", CHUNKS] = await rates(ours, 16, echo_request(CHUNKS, stream=True), True, seconds)
    pair = found["ours", 0].requests, found["ray", 0].requests
    streams = found["ours", CHUNKS].tokens, found["ray", CHUNKS].tokens
    return [
        row("echo, requests/s", "plain Ray Serve", *pair, ">= 2"),
        row("streams, tokens/s", "plain Ray Serve", *streams, ">= 1"),
    ]


def row(what: str, peer: str, ours: float, theirs: float, aim: str) -> tuple[str, ...]:
    return what, f"{ours:,.1f}", f"{theirs:,.1f} ({peer})", f"{ours / theirs:.2f}", aim


# --- generation ---


def chat_body(prompt: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "model", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def until_workers(server: Server, count: int) -> None:
    """Wait until so many workers are ready: a server is ready with its first one."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
            answer = httpx.get(f"{server.url}/models/model", timeout=10).raise_for_status().json()
            workers = [worker for group in answer[0]["models"][0]["workerGroups"] for worker in group["workers"]]
            if sum(worker["status"] == "READY" for worker in workers) == count:
                return
        time.sleep(0.5)
    sys.exit(f"{count} workers were not ready within 300 s")


async def tokens_per_second(server: Server, count: int, tokens: int) -> float:
    """Return the rate for `count` chats of `tokens` tokens, eight at a time."""
    await run_load(server.port, [chat_body(f"warm {number}", 4) for number in range(8)], 8, 4, CHAT)
    bodies = [chat_body(f"Tell me about the number {number}.", tokens) for number in range(count)]
    seconds, _ = await run_load(server.port, bodies, 8, tokens, CHAT)
    return count * tokens / seconds


async def generation(model: Path, count: int, threads: int) -> Rows:
    lines = generating(model, 2, threads)
    found = []
    for start in (cluster, one_machine):
        with start(lines) as server:
            until_workers(server, 2)
            found.append(await tokens_per_second(server, count, 64))
    return [row("generation, tokens/s", "two workers of serve", *found, ">= 0.95")]


async def generation_by_vllm(model: Path, count: int) -> Rows:
    with cluster(generating_by_vllm(model)) as ours:
        until_workers(ours, 1)
        measured = await tokens_per_second(ours, count, 64)
    with peer("ray_serve_llm.py", model) as theirs:
        theirs.wait_until_ready(post("/v1/chat/completions", chat_body("warm", 1)), 600)
        other = await tokens_per_second(theirs, count, 64)
    return [row("generation by vLLM, tokens/s", "Ray Serve LLM", measured, other, ">= 1")]


async def prefixes(model: Path, threads: int) -> Rows:
    """Ask about three long texts in turn; the best possible computes each text once, in one of three replicas."""
    texts = [" ".join(f"Fact {number} about {name} is {number * 7}." for number in range(60)) for name in "ABC"]
    bodies = [chat_body(f"{text} What is fact {question}?", 2) for question in range(QUESTIONS) for text in texts]
    with cluster(generating(model, PREFIXES, threads)) as ours:
        until_workers(ours, PREFIXES)
        _, records = await run_load(ours.port, bodies, 1, api=CHAT)
    cached = sum(record.usage["cached_tokens"] for record in records)
    best = sum(record.usage["prompt_tokens"] for record in records[PREFIXES:])
    return [row("three prefixes, three replicas: cached tokens", "prompts but the first ones", cached, best, ">= 0.9")]


async def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory for generation")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--count", type=int, default=32, help="chats of the measurement of generation")
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="threads of each worker and replica"
    )
    parser.add_argument("--only-generation", action="store_true", help="measure nothing but generation")
    parser.add_argument(
        "--ray-serve-llm", action="store_true", help="measure nothing but generation by vLLM, and Ray Serve LLM as peer"
    )
    arguments = parser.parse_args()
    # Ray gives an actor as many threads as processors, and `serve` divides those of the machine: both get the same.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    # Ray counts the processors of the machine, and a replica takes one: three would not fit on two.
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 8})
    rows: Rows = []
    only_generation = arguments.only_generation or arguments.ray_serve_llm
    if arguments.ray_serve_llm and arguments.model is None:
        parser.error("--ray-serve-llm needs --model")
    if arguments.ray_serve_llm:
        rows += await generation_by_vllm(arguments.model.resolve(), arguments.count)
    if not only_generation:
        rows += await relays(arguments.seconds)
    if arguments.model is not None and not arguments.ray_serve_llm:
        rows += await generation(arguments.model.resolve(), arguments.count, arguments.threads)
    if arguments.model is not None and not only_generation:
        rows += await prefixes(arguments.model.resolve(), arguments.threads)
    show(("measured", "cluster", "peer", "ratio", "aim"), rows, "A cluster of Ray on this machine", 140)


if __name__ == "__main__":
    uvloop.run(main())
