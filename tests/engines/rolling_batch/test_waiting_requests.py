"""What the rolling batch does with requests that wait, over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from product_helpers import Server, serving
from server_helpers import received
from vllm_helpers import make_tiny_model

pytestmark = pytest.mark.slow

PREFIX = 64
REQUESTS = 24
NEW_TOKENS = 24  # the others of a queue reach the scheduler while the first ones run
TOKENS = 2 * (PREFIX + NEW_TOKENS + 6) + 24  # room for two requests, and for little of a third
BYTES_PER_TOKEN = 512  # of the tiny model's KV cache in float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@contextlib.contextmanager
def two_at_a_time(directory: Path, model: Path, policy: str) -> Iterator[Server]:
    memory = str(TOKENS * BYTES_PER_TOKEN / 2**30)
    options = {"max_rolling_batch_size": "2", "kv_cache_memory_gb": memory, "schedule_policy": policy}
    options |= {"dtype": "fp32", "rolling_batch": "scheduler"}
    with serving(directory, model, libraries="transformers", **options) as server:
        yield server


def nearly_sent(server: Server, prompt: list[int]) -> socket.socket:
    """Send a request but for its last byte."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=120)
    connection.sendall(head.encode() + data[:-1])
    return connection


def answer(connection: socket.socket) -> Any:
    head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), body
    return json.loads(body)


def cached_tokens(server: Server) -> int:
    """Have requests with one of two prefixes wait; return how many of their prompt tokens were cached.

    They come while the worker is stopped, which may not last: the server ends a worker that is stopped for seconds.
    """
    chance = random.Random(3)
    prompts = [[*chance.choice(([5] * PREFIX, [6] * PREFIX)), 7 + number] for number in range(REQUESTS)]
    worker = server.worker_pid()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(nearly_sent(server, prompt)) for prompt in prompts]
        os.kill(worker, signal.SIGSTOP)
        for connection in connections:
            connection.sendall(b"}")
        server.wait_for("lmi_queue_depth", REQUESTS - 2)
        os.kill(worker, signal.SIGCONT)
        return sum(answer(each)["usage"]["prompt_tokens_details"]["cached_tokens"] for each in connections)


def test_lpm_reuses_more_of_a_queue_than_fcfs(model: Path, tmp_path: Path) -> None:
    counts = {}
    for policy in ("lpm", "fcfs"):
        (tmp_path / policy).mkdir()
        with two_at_a_time(tmp_path / policy, model, policy) as server:
            counts[policy] = cached_tokens(server)
    assert counts["lpm"] >= 1.3 * counts["fcfs"], counts
