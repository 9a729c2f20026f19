"""The ids that clients give their requests tell no requests apart in the rolling batch, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from held_server import hold, serving
from server_helpers import Server
from vllm_helpers import make_tiny_model

pytestmark = pytest.mark.slow

TOKENS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")
    with serving(directory, model, max_rolling_batch_size=16, kv_cache_memory_gb=0.1) as found:
        yield found


def completion(prompt: list[int], tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    common = {"model": "model", "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": prompt, "max_tokens": tokens, **more}


def text(server: Server, body: dict[str, Any]) -> str:
    """Return the text of a completion."""
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def texts(server: Server, directory: Path, bodies: list[dict[str, Any]]) -> list[str]:
    """Return the texts of completions that begin together: the engine waits until it has all of them."""
    worker = server.worker_pid()
    hold(directory, len(bodies))
    with ThreadPoolExecutor(len(bodies)) as threads:
        found = list(threads.map(lambda body: text(server, body), bodies))
    assert server.worker_pid() == worker, "no request ended the worker"
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_requests_with_one_id_get_each_its_own_text_and_end_nothing_else(
    server: Server, directory: Path, stream: bool
) -> None:
    """Two clients send the same id, the first one twice as much as the second; streams without an id run beside."""
    pair = [completion([3, 4, 5], 2 * TOKENS), completion([50, 60, 70, 80])]
    others = [completion([100 + number] * 3, 3 * TOKENS) for number in range(4)]
    expected = [text(server, body) for body in (*pair, *others)]
    assert len(set(expected)) == len(expected)
    twins = [{**body, "request_id": "mine", "stream": stream} for body in pair]
    streams = [{**body, "stream": True} for body in others]
    together = texts(server, directory, [*streams[:2], *twins, *streams[2:]])
    assert together == [*expected[2:4], *expected[:2], *expected[4:]]
