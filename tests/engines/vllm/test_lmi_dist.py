"""The lmi-dist handler over HTTP: vLLM on two ranks that mpirun starts gives the same tokens as one process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_helpers import save_adapter, with_adapter
from mpi_helpers import group_members, litter, process_of_rank
from paths import SAMPLES
from process_log import LIMIT_S
from processes import is_running
from product_helpers import Server, serving
from rolling_batch_helpers import generated_like
from tiny_models import byte_tokenizer
from transformers import PreTrainedModel
from vllm_helpers import make_tiny_model, tiny_llama

pytestmark = pytest.mark.slow

SAMPLE = SAMPLES / "lmi-dist.properties"
OTHER_THAN_IN_THE_SAMPLE = {
    "option.tensor_parallel_degree": "2",
    "option.dtype": "fp32",
    "option.max_rolling_batch_size": "8",
    "option.kv_cache_memory_gb": "0.1",
    "option.enable_lora": "true",
    "option.max_lora_rank": "8",
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lines = [line.partition("=")[::2] for line in SAMPLE.read_text().splitlines() if not line.startswith("#")]
    settings = {**dict(lines), **OTHER_THAN_IN_THE_SAMPLE, "option.model_id": str(tiny_model)}
    with serving(tmp_path_factory.mktemp("ranks"), tiny_model, libraries="vllm", **settings) as server:
        assert not shared_names(server)
        yield server
        assert server.stop() == 0
    assert not litter(server.process.pid)


def shared_names(server: Server) -> set[str]:
    """Return the names in /dev/shm of memory that the ranks map, without the files in the group's directory.

    A name outlives a killed process, so there must be none. Memory without a name is freed with its processes.
    """
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in group_members(server.process.pid)]
    names = {line.split(maxsplit=5)[-1] for text in maps for line in text.splitlines() if " /dev/shm/" in line}
    return {name for name in names if "(deleted)" not in name and "/lmi-" not in name}


def body(prompt: str, count: int, **more: Any) -> dict[str, Any]:
    return {"model": "model", "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, **more}


def assert_generated(tokens: list[int], model: PreTrainedModel, prompt: str, count: int) -> None:
    """Check that the tokens are those of the model itself."""
    assert tokens == generated_like(model, byte_tokenizer().encode(prompt), tokens, count)


def answer(server: Server, prompt: str, count: int, **more: Any) -> list[int]:
    response = server.http.post("/v1/completions", json=body(prompt, count, return_token_ids=True, **more))
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


async def answers_among_leavers(server: Server, prompts: list[str], counts: list[int]) -> list[list[int]]:
    """Return the tokens of requests that run beside others whose clients leave after one token."""

    async def leave(client: httpx.AsyncClient, prompt: str) -> None:
        async with client.stream("POST", "/v1/completions", json=body(prompt, 150, stream=True)) as reply:
            await anext(reply.aiter_lines())

    async def tokens(client: httpx.AsyncClient, prompt: str, count: int) -> list[int]:
        response = await client.post("/v1/completions", json=body(prompt, count, return_token_ids=True))
        return list(response.json()["choices"][0]["token_ids"])

    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
        leaving = [asyncio.create_task(leave(client, f"leaves {index}")) for index in range(6)]
        response = await asyncio.gather(*(tokens(client, *asked) for asked in zip(prompts, counts, strict=True)))
        await asyncio.gather(*leaving)
        return list(response)


def test_requests_that_come_and_go_get_the_tokens_of_one_rank(ranks: Server, reference: PreTrainedModel) -> None:
    chance = random.Random(1)
    prompts = [f"{index} " + "text " * chance.randint(1, 20) for index in range(12)]
    counts = [chance.randint(1, 60) for _ in prompts]
    response = asyncio.run(answers_among_leavers(ranks, prompts, counts))
    for tokens, *asked in zip(response, prompts, counts, strict=True):
        assert_generated(tokens, reference, *asked)


def test_all_ranks_sample_the_same_tokens(ranks: Server) -> None:
    """If a rank sampled other tokens, its KV cache would differ, and so would the probabilities of the next tokens."""
    drawn = ranks.http.post(
        "/v1/completions", json=body("draw", 60, temperature=1.0, logprobs=0, return_token_ids=True)
    )
    choice = drawn.json()["choices"][0]
    prompt = byte_tokenizer().encode("draw")
    scored = ranks.http.post(
        "/v1/completions",
        json={**body("", 1, prompt_logprobs=0), "prompt": [*prompt, *choice["token_ids"]]},
    )
    scores = scored.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    scored_again = [score[str(token)]["logprob"] for score, token in zip(scores, choice["token_ids"], strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(scored_again, abs=1e-4)


def test_a_seed_gives_one_text_and_a_schema_holds(ranks: Server) -> None:
    drawn = [answer(ranks, "seed", 20, temperature=0.9, seed=5) for _ in range(3)]
    assert drawn[0] == drawn[1] == drawn[2]
    wanted = {"structured_outputs": {"json": {"enum": ["x", "y"]}}, "ignore_eos": False}
    response = ranks.http.post("/v1/completions", json=body("schema", 10, **wanted)).json()
    assert json.loads(response["choices"][0]["text"]) in ("x", "y")


def test_a_request_that_is_refused_leaves_the_ranks_in_step(ranks: Server, reference: PreTrainedModel) -> None:
    wrong = ranks.http.post("/v1/completions", json=body("a", 3, structured_outputs={"json": {"type": "none such"}}))
    outside = ranks.http.post("/v1/completions", json={**body("", 3), "prompt": [5000]})
    assert (wrong.status_code, outside.status_code) == (400, 400)
    assert_generated(answer(ranks, "after", 8), reference, "after", 8)


def test_every_rank_has_the_adapters(ranks: Server, reference: PreTrainedModel, tmp_path: Path) -> None:
    save_adapter(reference, tmp_path / "one", 1, r=8)
    save_adapter(reference, tmp_path / "wide", 2, r=16)

    def register(name: str) -> int:
        source = {"name": name, "src": str(tmp_path / name)}
        return ranks.http.post("/models/model/adapters", params=source).status_code

    assert [register("one"), register("wide")] == [200, 424]
    adapted = with_adapter(reference, tmp_path / "one")
    assert_generated(answer(ranks, "Once", 12, model="one"), adapted, "Once", 12)
    assert_generated(answer(ranks, "Once", 12), reference, "Once", 12)


def test_a_lost_rank_ends_its_group_and_the_next_one_answers(ranks: Server, reference: PreTrainedModel) -> None:
    members = group_members(ranks.process.pid)
    with ranks.http.stream("POST", "/v1/completions", json=body("a stream", 200, stream=True)) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(process_of_rank(ranks.process.pid, 1), signal.SIGKILL)
        list(lines)
    ranks.log_line(r"process \d+ was ended|process \d+ exited")
    assert_generated(answer(ranks, "after", 5), reference, "after", 5)
    assert not any(map(is_running, members))
