"""What the rolling batch does with requests that wait, over HTTP."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from product_helpers import Server, serving
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
    with serving(directory, model, dtype="fp32", rolling_batch="scheduler", **options) as server:
        yield server


def cached_tokens(server: Server) -> int:
    """Have requests with one of two prefixes wait; return how many of their prompt tokens were cached."""
    chance = random.Random(3)
    prompts = [[*chance.choice(([5] * PREFIX, [6] * PREFIX)), 7 + number] for number in range(REQUESTS)]
    bodies = [{"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True} for prompt in prompts]
    worker = server.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(REQUESTS) as threads:
        answers = [threads.submit(server.http.post, "/v1/completions", json=body) for body in bodies]
        server.wait_for("lmi_queue_depth", REQUESTS - 2)
        os.kill(worker, signal.SIGCONT)
        found = [answer.result() for answer in answers]
    assert {answer.status_code for answer in found} == {200}
    return sum(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found)


def test_lpm_reuses_more_of_a_queue_than_fcfs(model: Path, tmp_path: Path) -> None:
    counts = {}
    for policy in ("lpm", "fcfs"):
        (tmp_path / policy).mkdir()
        with two_at_a_time(tmp_path / policy, model, policy) as server:
            counts[policy] = cached_tokens(server)
    assert counts["lpm"] >= 1.3 * counts["fcfs"], counts
