"""The rolling batch as on a GPU: simulated tensors, FakeCuda's memory, and the operators that run there.

The tokens have to be those of the model as transformers computes it on the CPU, in float32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from fake_cuda import GIB, FakeCuda
from rolling_batch_helpers import Received, generated, prompts
from simulated_devices import SimulatedDevices
from tiny_models import CONTEXT, byte_tokenizer, tiny_model

from handlers.huggingface.options import HuggingFaceOptions
from handlers.ranks.sharding import local_bytes
from handlers.rolling_batch.attention import torch_attention as attention
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.engine_loading import LoadedEngine, LoadedModel, load_engine
from handlers.rolling_batch.runner.load_check import LoadCheck
from lmi_server.contract.errors import HandlerError, ModelMemoryError
from lmi_server.contract.generation import SamplingParameters

GPU = torch.device("meta", 0)
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
SCORES = attention.MAX_SCORES * 12


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with SimulatedDevices():
        yield FakeCuda().install(monkeypatch)


def on_gpu(model: Any) -> Any:
    """Return the model with all of its layers on the simulated GPU."""
    dispatch_model(model, {"": "meta:0"}, force_hooks=True)
    return model


def load(model: Any = None, **options: Any) -> LoadedEngine:
    given = HuggingFaceOptions(dtype="fp32", **options)
    placed = on_gpu(model or tiny_model("llama"))
    loaded = LoadedModel(placed, byte_tokenizer(), given.max_model_len or CONTEXT, local_bytes(placed))
    return load_engine(lambda: loaded, given)


def tokens(loaded: LoadedEngine, prompt: list[int], count: int = 6, **parameters: Any) -> list[int]:
    answer = Received()
    asked = SamplingParameters(max_new_tokens=count, **parameters)
    loaded.engine.add("a", prompt, asked, "", 3, answer.take)
    while loaded.engine.has_work:
        loaded.engine.step()
    if answer.error is not None:
        raise answer.error
    return answer.tokens


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("gemma2_with_soft_caps", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_a_model_on_a_gpu_generates_what_it_does_on_the_cpu(cuda: FakeCuda, family: str) -> None:
    reference = tiny_model(family)
    loaded = load(copy.deepcopy(reference))
    assert loaded.details["device"] == "meta:0"
    assert loaded.details["fused_modules"] == {}
    for prompt in prompts(4):
        assert tokens(loaded, prompt) == generated(reference, prompt, 6)


def test_the_kv_cache_gets_what_a_step_leaves_free(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """It leaves room for activations, scores, and the keys and values that attention gathers: one layer more."""
    cuda.memory = [(SCORES + 2**20, GIB)]
    cuda.step_bytes = 2**19
    with caplog.at_level(logging.WARNING):
        loaded = load(max_rolling_batch_size=8)
    room = (2**20 - 2**19) * 2 / 3
    assert loaded.kv_tokens == int(room // PER_TOKEN)
    assert loaded.max_model_len == loaded.kv_tokens // 8 < CONTEXT
    assert f"prompts and outputs of more than {loaded.max_model_len} tokens" in caplog.text
    assert loaded.details["chunked_prefill_size"] == CONTEXT  # no prompt is longer


def test_a_smaller_step_is_taken_if_the_largest_needs_too_much(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    small = tiny_model("llama")
    small.config.max_position_embeddings = 1024
    given = HuggingFaceOptions(dtype="fp32", max_rolling_batch_size=1)
    cuda.step_bytes = 10 * GIB
    with caplog.at_level(logging.WARNING):
        loaded = load_engine(lambda: LoadedModel(on_gpu(small), byte_tokenizer(), 1024, {}), given)
    assert loaded.details["chunked_prefill_size"] == 256
    assert "a step computes at most 256 prompt tokens" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_fraction_static": 0.99}, "option.mem_fraction_static=0.99: .* GiB on meta:0, where 0.5 GiB are free"),
        ({"kv_cache_memory_gb": 0.6}, "option.kv_cache_memory_gb=0.6: the KV cache takes 0.6 GiB .*lower it"),
        ({"max_model_len": 200, "max_rolling_batch_size": 50_000, "kv_cache_memory_gb": 0.4},
         "for each of 50000 requests at a time, and each may have 200; lower option.max_rolling_batch_size"),
        ({"max_rolling_batch_size": 50_000, "kv_cache_memory_gb": 0.2}, "8 for each of 50000 requests"),
    ],
)  # fmt: skip
def test_more_than_a_gpu_has_is_refused_by_name(cuda: FakeCuda, options: dict[str, Any], message: str) -> None:
    cuda.memory = [(GIB // 2, 100 * GIB)]
    given = {"max_rolling_batch_size": 10**7, **options}
    with pytest.raises(ModelMemoryError, match=message):
        load(**given)


def full(*arguments: Any, **more: Any) -> None:
    """Stands for any function that runs on a GPU without memory."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAdvice for developers")


def test_a_kv_cache_that_cannot_be_allocated_names_its_keys(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, **more: full() if len(shape) == 4 else zeros(shape, **more))
    with pytest.raises(ModelMemoryError, match=r"leaves too little memory .*2\.00 GiB\.\); lower option\.kv_cache_mem"):
        load()


def test_a_step_without_memory_for_its_chunk_names_the_key(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = on_gpu(tiny_model("llama"))
    loaded = LoadedModel(placed, byte_tokenizer(), CONTEXT, {}, check=LoadCheck(tiny_model("llama"), CONTEXT))
    runner = loaded.runner()
    placed.forward = full
    options = HuggingFaceOptions(dtype="fp32", chunked_prefill_size=100)
    with pytest.raises(ModelMemoryError, match=r"option.chunked_prefill_size=100: a GPU has no memory for a step"):
        load_engine(lambda: _Ready(loaded, runner), options)


class _Ready:
    """A loaded model whose runner was made before its memory ran out."""

    def __init__(self, loaded: LoadedModel, runner: Any) -> None:
        self.model, self.tokenizer, self.max_len, self.weights = loaded.model, loaded.tokenizer, loaded.max_len, {}
        self.details: dict[str, Any] = {}
        self.runner = lambda: runner


def test_a_gpu_gets_slots_of_the_length_that_was_planned() -> None:
    layers = [LayerShape(1, 80, 80, torch.device("meta"))]
    assert KVCache(layers, 2, 130, torch.float16).max_len == 130


def test_the_check_compares_logits_of_models_that_have_moved(cuda: FakeCuda) -> None:
    """DeepSpeed loads the whole model in main memory, and moves this rank's part to its GPU."""
    model = tiny_model("llama")
    check = LoadCheck(model, CONTEXT)
    loaded = LoadedModel(on_gpu(model), byte_tokenizer(), CONTEXT, {}, check=check)
    engine = load_engine(lambda: loaded, HuggingFaceOptions(dtype="fp32"))
    assert tokens(engine, [1, 2, 3]) == generated(tiny_model("llama"), [1, 2, 3], 6)


@pytest.mark.parametrize("most", [1, 300, 2**26])
def test_long_chunks_attend_in_blocks(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, most: int) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", most)
    loaded = load(chunked_prefill_size=64)
    prompt = prompts(8)[-1] * 2
    assert tokens(loaded, prompt, 3) == generated(tiny_model("llama"), prompt, 3)


@pytest.mark.slow
def test_every_way_to_sample_runs_on_a_gpu(cuda: FakeCuda) -> None:
    loaded, expected = load(), generated(tiny_model("llama"), [1, 2, 3], 4)
    near_greedy = {"do_sample": True, "temperature": 0.001, "seed": 1}
    for parameters in (
        {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}, {"top_k": 400}, {"top_k": 5, "top_p": 0.5},
    ):  # fmt: skip
        assert tokens(loaded, [1, 2, 3], 4, **near_greedy, **parameters) == expected
    banned = tokens(loaded, [1, 2, 3], 4, allowed_token_ids=(7, 8), min_tokens=4)
    assert set(banned) <= {7, 8}
    biased = tokens(loaded, [1, 2, 3], 4, logit_bias={9: 100.0}, repetition_penalty=1.1, frequency_penalty=0.1)
    assert 9 in biased
    assert len(tokens(loaded, [1, 2, 3], 4, logprobs=2, prompt_logprobs=2)) == 4


class _Poisoned(torch.nn.Module):
    """An embedding whose token 230 has no finite values, as an overflow in fp16 makes them."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    @property
    def weight(self) -> torch.Tensor:
        return self.embedding.weight  # type: ignore[return-value]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.where((ids == 230)[..., None], torch.nan, self.embedding(ids))


def test_a_sequence_that_overflows_spoils_no_other(cuda: FakeCuda) -> None:
    """Others read what it left in its slot, masked; and zero times NaN is NaN."""
    model = tiny_model("llama")
    check = LoadCheck(model, CONTEXT)
    model.model.embed_tokens = _Poisoned(model.model.embed_tokens)
    loaded = LoadedModel(on_gpu(model), byte_tokenizer(), CONTEXT, {}, check=check)
    engine = load_engine(lambda: loaded, HuggingFaceOptions(dtype="fp32", max_rolling_batch_size=2))
    with pytest.raises(HandlerError, match="no finite numbers"):
        tokens(engine, [230] * 60, 2, ignore_eos=True)
    tokens(engine, [230] * 60 + [1], 2, ignore_eos=True)
    answers = [Received(), Received()]
    for index, prompt in enumerate(([1, 2, 3], list(range(70)))):
        asked = SamplingParameters(max_new_tokens=5, ignore_eos=True)
        engine.engine.add(str(index), prompt, asked, "", 3, answers[index].take)
    while engine.engine.has_work:
        engine.engine.step()
    assert answers[0].tokens == generated(tiny_model("llama"), [1, 2, 3], 5)
