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

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.load import CHAT, run_load
from benchmarks.relay import Server, rates

PEER = Path(__file__).parent / "peers" / "ray_serve_echo.py"
LLM_PEER = Path(__file__).parent / "peers" / "ray_serve_llm.py"
CHUNKS = 2000
PREFIXES, QUESTIONS = 3, 8  # of the measurement of prefixes, which has as many replicas as prefixes


def model_directory(parent: Path, lines: str) -> Path:
    directory = parent / "model"
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text(lines)
    return directory


@contextlib.contextmanager
def serving(*command: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as parent:
        server = Server(sys.executable, *(part.replace("{tmp}", parent) for part in command))
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def serving_model(lines: str, *command: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as parent:
        directory = str(model_directory(Path(parent), lines))
        with serving("-m", "lmi_server", *command, directory, "--host", "127.0.0.1", "--port", "{port}") as server:
            yield server


def cluster(lines: str) -> contextlib.AbstractContextManager[Server]:
    return serving_model(lines, "ray", "deploy")


def one_machine(lines: str) -> contextlib.AbstractContextManager[Server]:
    return serving_model(lines, "serve")


def echo(workers: int) -> str:
    return f"option.entryPoint=djl_python.echo\noption.max_rolling_batch_size=256\nminWorkers={workers}\n"


def generating(model: Path, workers: int, threads: int) -> str:
    lines = ["engine=Python", "option.entryPoint=djl_python.huggingface", "option.rolling_batch=scheduler"]
    lines += [f"option.threads={threads}"]
    lines += [f"option.model_id={model}", "option.dtype=bf16", f"minWorkers={workers}", f"maxWorkers={workers}"]
    return "\n".join(lines)


def generating_by_vllm(model: Path) -> str:
    lines = ["engine=Python", "option.rolling_batch=vllm", f"option.model_id={model}", "option.dtype=bf16"]
    lines += ["option.max_model_len=512", "option.gpu_memory_utilization=0.1", "minWorkers=1", "maxWorkers=1"]
    return "\n".join(lines)


# --- echo ---


async def relays(table: Table, seconds: float) -> None:
    requests, chunks = {}, {}
    for name, count in (("requests", 0), ("chunks", CHUNKS)):
        with serving(str(PEER), "{port}", "{tmp}", str(count)) as peer:
            measured = await rates(peer, 16, CHUNKS, bool(count), seconds)
            {"requests": requests, "chunks": chunks}[name]["ray"] = measured
    with cluster(echo(1)) as ours:
        requests["ours"] = await rates(ours, 16, 4, False, seconds)
        chunks["ours"] = await rates(ours, 16, CHUNKS, True, seconds)
    pair = requests["ours"].requests, requests["ray"].requests
    row(table, "echo, requests/s", "plain Ray Serve", *pair, ">= 2")
    row(table, "streams, tokens/s", "plain Ray Serve", chunks["ours"].tokens, chunks["ray"].tokens, ">= 1")


def row(table: Table, what: str, peer: str, ours: float, theirs: float, aim: str) -> None:
    table.add_row(what, f"{ours:,.1f}", f"{theirs:,.1f} ({peer})", f"{ours / theirs:.2f}", aim)


# --- generation ---


def chat_body(prompt: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "model", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def chat(server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    return post(server, chat_body(prompt, tokens))


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def ready_workers(server: Server) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/models/model", timeout=10) as answer:
        groups = json.load(answer)[0]["models"][0]["workerGroups"]
    return sum(worker["status"] == "READY" for group in groups for worker in group["workers"])


async def until_ready(server: Server, workers: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(ready_workers, server) == workers:
                return
        await asyncio.sleep(0.5)
    sys.exit(f"{workers} workers were not ready within 300 s")


async def until_answered(server: Server) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(chat, server, "warm", 1)
            return
        await asyncio.sleep(1)
    sys.exit("the peer did not answer within 600 s")


async def tokens_per_second(server: Server, count: int, tokens: int) -> float:
    """Return the rate for `count` chats of `tokens` tokens, eight at a time."""
    await run_load(server.port, [chat_body(f"warm {number}", 4) for number in range(8)], 8, 4, CHAT)
    bodies = [chat_body(f"Tell me about the number {number}.", tokens) for number in range(count)]
    seconds, _ = await run_load(server.port, bodies, 8, tokens, CHAT)
    return count * tokens / seconds


async def generation(table: Table, model: Path, count: int, threads: int) -> None:
    lines = generating(model, 2, threads)
    with cluster(lines) as ours:
        await until_ready(ours, 2)
        measured = await tokens_per_second(ours, count, 64)
    with one_machine(lines) as theirs:
        await until_ready(theirs, 2)
        peer = await tokens_per_second(theirs, count, 64)
    row(table, "generation, tokens/s", "two workers of serve", measured, peer, ">= 0.95")


async def generation_by_vllm(table: Table, model: Path, count: int) -> None:
    with cluster(generating_by_vllm(model)) as ours:
        await until_ready(ours, 1)
        measured = await tokens_per_second(ours, count, 64)
    with serving(str(LLM_PEER), "{port}", "{tmp}", str(model)) as theirs:
        await until_answered(theirs)
        peer = await tokens_per_second(theirs, count, 64)
    row(table, "generation by vLLM, tokens/s", "Ray Serve LLM", measured, peer, ">= 1")


async def prefixes(table: Table, model: Path, threads: int) -> None:
    """Ask about three long texts in turn; the best possible computes each text once, in one of three replicas."""
    texts = [" ".join(f"Fact {number} about {name} is {number * 7}." for number in range(60)) for name in "ABC"]
    with cluster(generating(model, PREFIXES, threads)) as ours:
        await until_ready(ours, PREFIXES)
        usages = []
        for question in range(QUESTIONS):
            for text in texts:
                answer = await asyncio.to_thread(chat, ours, f"{text} What is fact {question}?", 2)
                usages.append(answer["usage"])
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    best = sum(usage["prompt_tokens"] for usage in usages[PREFIXES:])
    row(table, "three prefixes, three replicas: cached tokens", "prompts but the first ones", cached, best, ">= 0.9")


async def main() -> None:
    parser = argparse.ArgumentParser()
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
    table = Table("measured", "cluster", "peer", "ratio", "aim", title="A cluster of Ray on this machine")
    only_generation = arguments.only_generation or arguments.ray_serve_llm
    if arguments.ray_serve_llm and arguments.model is None:
        parser.error("--ray-serve-llm needs --model")
    if arguments.ray_serve_llm:
        await generation_by_vllm(table, arguments.model.resolve(), arguments.count)
    if not only_generation:
        await relays(table, arguments.seconds)
    if arguments.model is not None and not arguments.ray_serve_llm:
        await generation(table, arguments.model.resolve(), arguments.count, arguments.threads)
    if arguments.model is not None and not only_generation:
        await prefixes(table, arguments.model.resolve(), arguments.threads)
    Console(width=140).print(table)


if __name__ == "__main__":
    uvloop.run(main())
