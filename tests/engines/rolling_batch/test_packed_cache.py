"""A KV cache in 8 bits: its rows are rounded as described, and every token is that of a model that rounds the same way.

The reference is transformers' own model with an attention function that rounds keys and values, computed anew for each
token without a cache.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_helpers import ALL_LINEAR, read_adapter, save_adapter, with_adapter
from rolling_batch_helpers import Engine, GivenStepTimes, check_log_probabilities, generated_like, prompts
from tiny_models import CONTEXT, convolutional_hybrid, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from handlers.cpu_kernels.arguments import SeenColumns, SlotSpan
from handlers.cpu_kernels.arrays import as_numpy
from handlers.cpu_kernels.attention.decoding import write_rows
from handlers.huggingface.options import HuggingFaceMemory, HuggingFaceOptions
from handlers.rolling_batch.attention.kernel_attention import KernelAttention
from handlers.rolling_batch.attention.kv_cache import PACKED_TYPES, KVCache, LayerShape, bytes_per_token, unpack_rows
from handlers.rolling_batch.attention.rows import StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.attention.torch_attention import TorchAttention
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.speculation.drafting import Speculation
from lmi_server.contract.errors import ModelLoadError

KINDS = sorted(PACKED_TYPES)
GREATEST = {"int8": 127.0, "fp8": 448.0}


def rounded(states: torch.Tensor, kind: str) -> torch.Tensor:
    """Return keys or values, (..., dim), as a cache of a kind has them, in float32."""
    states = states.float()
    greatest = states.abs().amax(-1, keepdim=True)
    above = ((greatest / GREATEST[kind]).view(torch.int32) + 0xFFFF) >> 16 << 16  # bfloat16, rounded up
    scales = torch.where(greatest < 1e-30, 0.0, above.view(torch.float32))
    numbers = states * torch.where(scales == 0, 0.0, 1 / scales)
    numbers = torch.round(numbers) if kind == "int8" else numbers.to(torch.float8_e4m3fn).float()
    return numbers * scales


def rounding_model(model: Any, kind: str) -> Any:
    """Return a copy of a model, in float32, that rounds keys and values of every token."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **terms: Any
    ) -> Any:
        group = query.shape[1] // key.shape[1]
        keys, values = (rounded(states, kind).repeat_interleave(group, 1) for states in (key, value))
        scores = query @ keys.transpose(2, 3) * (terms.get("scaling") or query.shape[3] ** -0.5)
        if softcap := terms.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        return ((scores + mask).softmax(-1) @ values).transpose(1, 2).contiguous(), None

    name = f"rounding_{kind}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    copied = copy.deepcopy(model).float()
    copied.set_attn_implementation(name)
    copied.config.use_cache = copied.generation_config.use_cache = False
    return copied


def random_cache(shape: LayerShape, kind: str, slots: int, tokens: int, chance: torch.Generator) -> KVCache:
    """Return a cache whose slots hold random tokens."""
    cache = KVCache([shape.packed()], slots, tokens, PACKED_TYPES[kind])
    write = write_rows(np.dtype(np.float32), as_numpy(cache.keys[0]).dtype)
    for slot in range(slots):
        key, value = (
            as_numpy(torch.randn((shape.kv_heads, tokens, dim), generator=chance))
            for dim in (shape.head_dim, shape.value_dim)
        )
        write(key, value, as_numpy(cache.keys[0]), as_numpy(cache.values[0]), np.full(tokens, slot), np.arange(tokens))
    return cache


# --- the kernels ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_described(kind: str, dtype: torch.dtype) -> None:
    states = torch.randn((2, 60, 33), generator=torch.Generator().manual_seed(1)).to(dtype)
    states[0, 3], states[0, 4], states[1, 5] = 0, states[0, 4] * 1e-33, states[1, 5] * 1e30
    states[0, 6] = torch.logspace(-9, 0, 33)
    states[1, 7, 2], states[1, 8, 32] = torch.inf, torch.nan
    cache = KVCache([LayerShape(2, 33, 33).packed()], 2, 60, PACKED_TYPES[kind])
    own = as_numpy(states)
    kept = [as_numpy(area) for area in (cache.keys[0], cache.values[0])]
    write_rows(own.dtype, kept[0].dtype)(own, own, *kept, np.ones(60, np.int64), np.arange(60))
    broken = ~states.isfinite().all(-1)
    for area in (cache.keys[0], cache.values[0]):
        found = unpack_rows(area[1, :, :60], torch.float32)
        assert torch.equal(found[~broken], rounded(states, kind)[~broken])
        assert found[broken].isnan().all(), "whoever sees such a token has to fail"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 33), (16, 144)])
@pytest.mark.parametrize(("window", "chunk", "softcap"), [(0, 0, 0.0), (20, 0, 4.0), (0, 16, 0.0)])
def test_rows_attend_to_packed_slots(
    kind: str, dtype: torch.dtype, error: float, dims: tuple[int, int], window: int, chunk: int, softcap: float
) -> None:
    chance = torch.Generator().manual_seed(1)
    positions = np.array([0, 5, 15, 17, 63, 64, 130])
    slots = np.arange(len(positions))[::-1].copy()
    cache = random_cache(LayerShape(2, *dims), kind, len(slots), 131, chance)
    query, key, value = (
        torch.randn((heads, len(slots), dim), generator=chance).to(dtype)
        for heads, dim in ((6, dims[0]), (2, dims[0]), (2, dims[1]))
    )
    found = torch.zeros((len(slots), 6, dims[1]), dtype=dtype)
    terms = AttentionTerms(0.3, window, chunk, softcap)
    states, step = States(query, key, value), StepRows(slots, positions, [])
    KernelAttention(cache, dtype).attend_single(0, states, step, found, terms)
    plain = KVCache([LayerShape(2, *dims)], len(slots), 131, torch.float32)
    for area, packed in ((plain.keys[0], cache.keys[0]), (plain.values[0], cache.values[0])):
        area[:, :, :131] = unpack_rows(packed[:, :, :131], torch.float32)
    expected = torch.zeros_like(found, dtype=torch.float32)
    own = States(query.float(), rounded(key, kind), rounded(value, kind))
    KernelAttention(plain).attend_single(0, own, step, expected, terms)
    assert float((found.float() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize(("start", "rows"), [(0, 70), (37, 64), (300, 33)])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (50, 0), (0, 40)])
@pytest.mark.parametrize("shape", [LayerShape(2, 16, 24), LayerShape(1, 33, 129)])
def test_a_chunk_attends_to_a_packed_slot(
    kind: str, dtype: torch.dtype, error: float, start: int, rows: int, window: int, chunk: int, shape: LayerShape
) -> None:
    chance = torch.Generator().manual_seed(1)
    end = start + rows
    cache = random_cache(shape, kind, 2, end, chance)
    query = torch.randn((6, rows, shape.head_dim), generator=chance).to(dtype)
    terms, columns = AttentionTerms(0.3, window, chunk), SeenColumns.from_lengths([rows], start, window, chunk)
    span = SlotSpan(1, columns.begin, end)
    found, expected = (torch.zeros((rows, 6, shape.value_dim), dtype=kind) for kind in (dtype, torch.float32))
    states = States(query, cache.keys[0], cache.values[0])
    KernelAttention(cache, dtype).attend_chunk(states, span, found, columns, terms)
    # torch's operators unpack rows too: those of images attend so.
    TorchAttention(cache).attend_chunk(states._replace(query=query.float()), span, expected, columns, terms)
    assert float((found.float() - expected).norm() / expected.norm()) < error


# --- whole models ---


def check_random_requests(engine: Engine, kind: str, count: int, **parameters: Any) -> None:
    """Let requests of mixed lengths come and go; each gets the tokens of the model that rounds."""
    reference = rounding_model(engine.reference, kind)
    chance = random.Random(3)
    shared = prompts(1, seed=9)[0] * 3
    pending = [(shared[: chance.randrange(0, 60)] + prompt, chance.choice([1, 5, 12])) for prompt in prompts(count)]
    answers: list[tuple[list[int], int, Any]] = []

    def arrive() -> None:
        if pending and chance.random() < 0.6:
            prompt, length = pending.pop()
            answers.append((prompt, length, engine.add(prompt, max_new_tokens=length, **parameters)[1]))

    while pending:
        arrive()
        engine.run(arrive)
    for prompt, length, answer in answers:
        assert answer.error is None
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, length)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "mistral_with_window", "gemma2_with_soft_caps", "gpt2", "qwen3"])
def test_every_token_is_that_of_a_model_that_rounds_the_same_way(kind: str, family: str) -> None:
    """With chunks of prompts, prefixes of other slots, and requests that come while others run."""
    engine = Engine(tiny_model(family), kv_dtype=kind)
    check_random_requests(engine, kind, 14)
    assert engine.engine.stats.cached_prompt_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_keep_states_are_served_beside_packed_ones(kind: str) -> None:
    check_random_requests(Engine(convolutional_hybrid(), kv_dtype=kind), kind, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_retracted_requests_go_on(kind: str) -> None:
    engine = Engine(tiny_model("llama"), kv_dtype=kind, kv_tokens=260, conservativeness=0.1)
    answers = [(prompt, engine.add(prompt, max_new_tokens=60)[1]) for prompt in prompts(8)]
    engine.run()
    assert engine.engine.stats.retracted_requests > 0
    reference = rounding_model(engine.reference, kind)
    for prompt, answer in answers:
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_changes_no_token(kind: str) -> None:
    engine = Engine(tiny_model("llama"), kv_dtype=kind)
    engine.engine.speculate(Speculation(4, GivenStepTimes(0.05)))
    check_random_requests(engine, kind, 10)
    assert engine.engine.stats.drafted_tokens > 0


@pytest.mark.slow
def test_adapters_change_what_they_change_elsewhere(tmp_path: Path) -> None:
    engine = Engine(tiny_model("llama"), kv_dtype="int8")
    directory = save_adapter(engine.reference, tmp_path / "adapter", 1, target_modules=ALL_LINEAR)
    adapter = engine.engine.load_adapter(read_adapter(str(directory)))
    answers = [(prompt, engine.add(prompt, adapter, max_new_tokens=9)[1]) for prompt in prompts(4)]
    engine.run()
    reference = rounding_model(with_adapter(engine.reference, directory), "int8")
    for prompt, answer in answers:
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_models_in_bfloat16_stay_near_the_exact_one(kind: str, family: str) -> None:
    model = tiny_model(family, torch.bfloat16)
    exact = rounding_model(model, kind)
    engine = Engine(model, kv_dtype=kind)
    asked = [(prompt, engine.add(prompt, max_new_tokens=9, logprobs=0)[1]) for prompt in prompts(8)]
    engine.run()
    check_log_probabilities(exact, asked)


# --- memory, and what is refused ---


def test_a_token_takes_half_the_memory_of_bfloat16() -> None:
    shape = LayerShape(8, 128, 128)
    packed = bytes_per_token([shape.packed()], torch.int8)
    assert packed == 8 * 2 * (128 + 2)
    assert packed / bytes_per_token([shape], torch.bfloat16) < 0.51
    assert HuggingFaceMemory(HuggingFaceOptions(kv_cache_dtype="fp8")).kv_row_bytes(128, 2) == 130
    assert HuggingFaceMemory(HuggingFaceOptions()).kv_row_bytes(128, 2) == 256


def test_models_that_do_not_attend_by_the_kernels_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"option\.kv_cache_dtype=int8: the model is in float16 on cpu, .*remove"):
        ModelRunner(tiny_model("llama", torch.float16), CONTEXT, kv_dtype="int8")
