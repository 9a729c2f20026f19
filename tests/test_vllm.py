"""The vllm handler with the real engine, over HTTP, beside vLLM's own server on the same model."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from product_helpers import Server, serving
from vllm_helpers import make_tiny_model, vllm_server

pytestmark = pytest.mark.slow

SETTINGS = {"rolling_batch": "vllm", "dtype": "fp32", "max_rolling_batch_size": "32", "kv_cache_memory_gb": "1"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def ours(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("ours"), tiny_model, **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def theirs(tiny_model: Path) -> Iterator[httpx.Client]:
    arguments = ("--dtype", "float32", "--max-num-seqs", "32", "--enforce-eager", "--disable-uvicorn-access-log")
    with vllm_server(tiny_model, "model", *arguments) as client:
        yield client


# --- the same requests to both ---


def text(chance: random.Random, longest: int) -> str:
    letters = string.ascii_lowercase + "   äß日"
    return "".join(chance.choice(letters) for _ in range(chance.randint(1, longest)))


def varied_request(index: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one of many different greedy requests."""
    chance = random.Random(index)
    body: dict[str, Any] = {"model": "model", "temperature": 0, "max_tokens": chance.randint(1, 24)}
    optional: dict[str, Any] = {
        "stop": [chance.choice("aeiou"), "xy"],
        "ignore_eos": True,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"101": 5, "116": -3},
        "min_tokens": 1,
        "stop_token_ids": [101, 202],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 4,
    }
    body |= {name: optional[name] for name in chance.sample(sorted(optional), chance.randint(0, 4))}
    if chance.random() < 0.4:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if chance.random() < 0.4:
        roles = ("system", "user", "assistant", "user")
        body["messages"] = [{"role": role, "content": text(chance, 20)} for role in roles[: chance.randint(1, 4)]]
        if chance.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
        return "/v1/chat/completions", body
    body["prompt"] = text(chance, 60) if chance.random() < 0.8 else [chance.randrange(257) for _ in range(9)]
    if chance.random() < 0.5:
        body["logprobs"] = chance.randint(1, 5)
    if chance.random() < 0.2:
        body["echo"] = True
    return "/v1/completions", body


def answered(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return text, finish reason, usage and log probabilities of an answer, streamed or whole."""
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        whole = reply.json()
        choice = whole["choices"][0]
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        return {
            "text": said or "",
            "reason": choice["finish_reason"],
            "usage": counts(whole["usage"]),
            "scores": scores(choice["logprobs"]),
        }
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = "".join((choice["text"] if "text" in choice else choice["delta"].get("content")) or "" for choice in choices)
    return {
        "text": said,
        "reason": next(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
        "usage": counts(chunks[-1]["usage"]),
        "scores": [score for choice in choices for score in scores(choice.get("logprobs"))],
    }


def counts(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def scores(logprobs: dict[str, Any] | None) -> list[tuple[str, float | None, list[float]]]:
    """Return per token its text, its log probability and those of the alternatives, whatever the form."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            (entry["token"], entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]])
            for entry in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    # Tokens that end inside a character all have the same text, under which only one of them is left.
    return [
        (token, logprob, sorted((value for name, value in (top or {}).items() if name), reverse=True))
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    ]


def assert_same(mine: dict[str, Any], other: dict[str, Any], request: Any) -> None:
    for name in ("text", "reason", "usage"):
        assert mine[name] == other[name], (name, request)
    assert [score[0] for score in mine["scores"]] == [score[0] for score in other["scores"]], request
    for (_, logprob, top), (_, expected, others) in zip(mine["scores"], other["scores"], strict=True):
        assert logprob == (None if expected is None else pytest.approx(expected, abs=2e-4)), request
        assert top == pytest.approx(others, abs=2e-4), request


@pytest.mark.parametrize("block", range(10))
def test_the_same_requests_get_the_same_answers_from_both(ours: Server, theirs: httpx.Client, block: int) -> None:
    for index in range(20 * block, 20 * block + 20):
        path, body = varied_request(index)
        assert_same(answered(ours.http, path, body), answered(theirs, path, body), (index, body))
