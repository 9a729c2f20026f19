"""A model split over two ranks, over real HTTP: the same tokens as on one rank, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from mpi_helpers import (
    answered,
    body,
    clean,
    generated,
    generated_like,
    group_members,
    leave_after_a_token,
    process_of_rank,
)
from processes import is_running
from rolling_batch_helpers import round_any_rows
from server_helpers import Server, make_model
from tiny_models import CONTEXT, FAMILIES, byte_tokenizer, random_model, saved_model
from transformers import AutoModelForCausalLM

from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.ranks.sharding import check_degree
from lmi_server.contract.errors import ModelLoadError

pytestmark = pytest.mark.slow

HUGGING_FACE = "handlers.huggingface.handler:HuggingFaceHandler"
KV_TOKENS = 300  # so few that running requests are retracted
MPI_KEYS = {
    "entryPoint": "djl_python.huggingface",
    "rolling_batch": "scheduler",
    "mpi_mode": "true",
    "tensor_parallel_degree": 2,
    "dtype": "fp32",
    "kv_cache_memory_gb": KV_TOKENS * 512 / 2**30,
    "schedule_conservativeness": 0.1,
    "max_rolling_batch_size": 6,
}


def save(directory: Path) -> Any:
    """Save a tiny model whose vocabulary two ranks can share; return it."""
    config = FAMILIES["llama"]()
    config.update({"vocab_size": 260})
    model = random_model(config)
    saved_model(model, directory)
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("weights")
    return directory, save(directory)


@pytest.fixture(scope="module")
def sharded(reference: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = make_model(tmp_path_factory.mktemp("tp") / "model", HUGGING_FACE, model_id=reference[0], **MPI_KEYS)
    with clean(directory, libraries="transformers") as server:
        server.loaded_line(r"\] loaded: .* ranks=2 ")
        yield server


async def tokens(client: httpx.AsyncClient, prompt: str, count: int) -> list[int]:
    answer = await client.post("/invocations", json=body(prompt, count))
    return answered(answer)


def test_the_tokens_are_those_of_one_rank_while_others_come_and_leave(
    sharded: Server, reference: tuple[Path, Any]
) -> None:
    """Many begin alike, and together they need more memory than there is: prefixes are reused, requests retracted."""
    chance = random.Random(3)
    texts = ["".join(chance.choices("abcdefgh ", k=length)) for length in (1, 3, 9, 20, 60, 130, 5, 44, 2, 90) * 2]
    prompts = [texts[5][: chance.choice([0, 40, 90])] + text for text in texts]
    counts = [chance.choice([1, 7, 24, 60]) for _ in prompts]
    assert max(len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)) <= CONTEXT

    async def ask() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sharded.port}", timeout=60) as client:
            leaving = [asyncio.create_task(leave_after_a_token(client, f"leaves {index}")) for index in range(6)]
            asked = zip(prompts, counts, strict=True)
            answers = await asyncio.gather(*(tokens(client, prompt, count) for prompt, count in asked))
            await asyncio.gather(*leaving)
            return answers

    for asked in zip(prompts, asyncio.run(ask()), counts, strict=True):
        assert asked[1] == generated_like(reference[1], *asked)
    for name in ("retracted_requests", "cached_prompt_tokens"):
        sharded.until_positive(f"lmi_handler_{name}_total")


def test_a_seed_gives_one_text(sharded: Server) -> None:
    request = {"inputs": "seed", "parameters": {"max_new_tokens": 20, "do_sample": True, "seed": 5, "top_p": 0.9}}
    texts = {sharded.http.post("/invocations", json=request).text for _ in range(3)}
    assert len(texts) == 1


def test_in_bfloat16_the_log_probabilities_stay_near_those_of_float32(
    reference: tuple[Path, Any], tmp_path: Path
) -> None:
    """Log probabilities are compared along the output tokens: rounding may flip a near tie."""
    keys = {**MPI_KEYS, "dtype": "bf16"}
    directory = make_model(tmp_path / "model", HUGGING_FACE, model_id=reference[0], **keys)
    with clean(directory, libraries="transformers") as server:
        server.loaded_line(r"fused_modules=\{.*'decoder_layers': [1-9]")

        async def ask() -> list[dict[str, Any]]:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
                asked = (client.post("/invocations", json=body("abc " * count, 15)) for count in range(1, 8))
                return [answer.json() for answer in await asyncio.gather(*asked)]

        answers = asyncio.run(ask())
    for count, answer in enumerate(answers, 1):
        assert_log_probabilities_near(reference[1], "abc " * count, answer, 0.25)


def assert_log_probabilities_near(model: Any, prompt: str, answer: dict[str, Any], error: float) -> None:
    """Compare them with the model's own for the tokens of an answer."""
    ids, tokens = byte_tokenizer().encode(prompt), answer["details"]["tokens"]
    with torch.inference_mode():
        given = torch.tensor([[*ids, *(token["id"] for token in tokens)]])
        rows = model(given).logits[0, len(ids) - 1 :].log_softmax(-1)
    expected = [float(rows[index, token["id"]]) for index, token in enumerate(tokens)]
    assert [token["log_prob"] for token in tokens] == pytest.approx(expected, abs=error)


def test_weights_in_blocks_are_split(tmp_path: Path) -> None:
    """Each rank quantises its part, whose blocks are those of the whole weights; so are blocks of rounded activations.

    Rounding makes the differences between two orders of sums grow: there log probabilities are compared.
    """
    config = FAMILIES["llama"]()
    config.update({"vocab_size": 260, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
    weights = saved_model(random_model(config), tmp_path / "weights")
    keys = {**MPI_KEYS, "kv_cache_memory_gb": 0.01, "quantize": "q4_0"}
    models = {}
    for name, activations in (("plain", "auto"), ("rounding", "int8")):
        make_model(tmp_path / name, HUGGING_FACE, model_id=weights, activation_dtype=activations, **keys)
        options = HuggingFaceOptions(dtype="fp32", quantize="q4_0", activation_dtype=activations)
        models[name] = load_model(AutoModelForCausalLM, str(weights), options)
    round_any_rows(models["rounding"])
    with clean(*(tmp_path / name for name in models), libraries="transformers") as server:
        for _ in models:  # in either order
            server.loaded_line(r"\] loaded: .*quantization=q4_0")
        for prompt in ("a", "the sea is", "b" * 60):
            tokens = answered(server.http.post("/predictions/plain", json=body(prompt, 20)))
            assert tokens == generated_like(models["plain"], prompt, tokens, 20)
            answer = server.http.post("/predictions/rounding", json=body(prompt, 20))
            assert_log_probabilities_near(models["rounding"], prompt, answer.json(), 0.25)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_lost_in_a_step_ends_the_streams_and_the_next_group_answers(
    number: int, sharded: Server, reference: tuple[Path, Any]
) -> None:
    follower = process_of_rank(sharded.process.pid, 1)
    members = group_members(sharded.process.pid)
    with sharded.http.stream("POST", "/invocations", json=body("a stream", 200, stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(follower, number)
        rest = list(lines)
    sharded.log_line(r"process \d+ was ended|process \d+ exited")
    assert "error" in rest[-1] or len(rest) == 199  # it may have been computed completely before
    # The request waits for the next group, which takes minutes to load if other tests keep all cores busy.
    answer = sharded.http.post("/invocations", json=body("after", 5), timeout=300)
    assert [token["id"] for token in answer.json()["details"]["tokens"]] == generated(reference[1], "after", 5)
    assert not any(map(is_running, members))


@pytest.mark.parametrize(
    ("changes", "degree", "message"),
    [
        ({"num_key_value_heads": 1}, 2, "tensor_parallel_degree=2 does not divide num_key_value_heads=1"),
        ({}, 3, "tensor_parallel_degree=3 does not divide num_attention_heads=4"),
        ({}, 2, "tensor_parallel_degree=2 does not divide vocab_size=259"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused_by_name(changes: dict[str, int], degree: int, message: str) -> None:
    config = FAMILIES["llama"]()
    config.update(changes)
    with pytest.raises(ModelLoadError, match=message):
        check_degree(config, degree)


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="no tensor-parallel plan for opt"):
        check_degree(FAMILIES["opt"](), 2)
