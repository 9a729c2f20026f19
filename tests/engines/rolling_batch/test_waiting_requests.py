"""What the rolling batch does with requests that wait, over HTTP."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
from held_server import hold, serving
from server_helpers import Server, connect, received
from vllm_helpers import make_tiny_model

pytestmark = pytest.mark.slow

PREFIX = 64
REQUESTS = 24
NEW_TOKENS = 24
TOKENS = 2 * (PREFIX + NEW_TOKENS + 6) + 24  # room for two requests, and for little of a third
BYTES_PER_TOKEN = 512  # of the tiny model's KV cache in float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


def sent(server: Server, prompt: list[int]) -> socket.socket:
    """Send a request."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    data = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    return connect(server, (head + data).encode())


def answer(connection: socket.socket) -> Any:
    head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), body
    return json.loads(body)


def cached_tokens(directory: Path, model: Path, policy: str) -> int:
    """Serve requests with one of two prefixes, which wait together; return how many of their tokens were cached."""
    chance = random.Random(3)
    prompts = [[*chance.choice(([5] * PREFIX, [6] * PREFIX)), 7 + number] for number in range(REQUESTS)]
    options = {"max_rolling_batch_size": 2, "kv_cache_memory_gb": TOKENS * BYTES_PER_TOKEN / 2**30}
    with serving(directory, model, schedule_policy=policy, **options) as server, contextlib.ExitStack() as stack:
        hold(directory, REQUESTS)
        connections = [stack.enter_context(sent(server, prompt)) for prompt in prompts]
        return sum(answer(each)["usage"]["prompt_tokens_details"]["cached_tokens"] for each in connections)


def test_lpm_reuses_more_of_a_queue_than_fcfs(model: Path, tmp_path: Path) -> None:
    counts = {policy: cached_tokens(tmp_path / policy, model, policy) for policy in ("lpm", "fcfs")}
    assert counts["lpm"] >= 1.3 * counts["fcfs"], counts
