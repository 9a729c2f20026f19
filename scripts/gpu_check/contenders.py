"""Who generates: this project in process and over HTTP, and two ways of transformers. Each prints its rates as JSON.

    python -m scripts.gpu_check.contenders CONTENDER SHAPE DEVICE TOKENS COUNT...

generates TOKENS tokens for each COUNT of requests at once, three times, with random weights in bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from benchmarks import generation
from benchmarks.load import LMI, run_load
from benchmarks.servers import serving
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.checkpoints.fp8.layers import replace_linears
from handlers.checkpoints.grouped.layers import GroupedLinear, GroupedWeight
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedEngine, LoadedModel, load_engine
from handlers.rolling_batch.lora.layers import LoraPair, LoraWeights
from handlers.rolling_batch.runner.load_check import LoadCheck
from lmi_server.contract.generation import SamplingParameters
from scripts.gpu_check.shapes import CONTEXT, bytes_per_step, random_model, tokenizer, write_checkpoint

PROMPT = 20  # tokens
_RANK = 16  # of adapters
_GIB = 2**30

Run = Callable[[int], None]
"""Generates for so many requests at once."""
Result = dict[str, Any]


def prompts(count: int) -> list[list[int]]:
    """Return prompts that share no prefix."""
    return [[10 + number, *range(100, 99 + PROMPT)] for number in range(count)]


def measure(run: Run, counts: list[int], tokens: int) -> dict[int, float]:
    """Return the median of the tokens per second for each count."""
    return {count: statistics.median(rates) for count, rates in generation.measure(run, counts, tokens).items()}


def load(
    shape: str, device: str, slots: int, weights: str | None = None, page: int | None = None, context: int = CONTEXT
) -> LoadedEngine:
    """Return this project's engine over a random model, as the handler makes it of a checkpoint.

    `weights` are the names of WEIGHTS, None for bf16.
    """
    options = HuggingFaceOptions(dtype="bf16", max_rolling_batch_size=slots)
    model = random_model(shape, device).requires_grad_(False)
    if weights is not None:
        WEIGHTS[weights](model)
    sizes = {torch.device(device, 0) if device == "cuda" else torch.device(device): _size(model)}
    check = LoadCheck(model, context, rounds_activations=weights == "fp8")
    return load_engine(lambda: LoadedModel(model, tokenizer(), context, sizes, check=check, page=page), options)


def add(
    loaded: LoadedEngine,
    count: int,
    tokens: int,
    sampled: bool = False,
    adapters: Sequence[LoraWeights | None] = (None,),
) -> list[Any]:
    """Add requests, which take turns with the adapters; return the list that gets their deltas."""
    deltas: list[Any] = []
    for number, prompt in enumerate(prompts(count)):
        drawn = {"do_sample": True, "top_p": 0.9, "seed": number} if sampled else {}
        parameters = SamplingParameters(max_new_tokens=tokens, ignore_eos=True, **drawn)
        adapter = adapters[number % len(adapters)]
        loaded.engine.add("check", prompt, parameters, "", 3, deltas.append, adapter)
    return deltas


def decode(loaded: LoadedEngine, count: int, tokens: int, **more: Any) -> None:
    """Generate for so many requests at once."""
    deltas = add(loaded, count, tokens, **more)
    while loaded.engine.has_work:
        loaded.engine.step()
    found = sum(len(delta.tokens) for delta in deltas)
    assert found == count * tokens, f"{found} tokens of {count * tokens} came"


def ours_with(weights: str, shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The engine in process, with weights of one of WEIGHTS."""
    loaded = load(shape, device, max(counts), weights)
    return {"rates": measure(lambda count: decode(loaded, count, tokens), counts, tokens)} | _memory(device)


def _grouped(model: Any, hold: Callable[[torch.Tensor], GroupedWeight]) -> None:
    """Replace the linear layers of a model but its head."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not model.get_output_embeddings():
                setattr(module, name, GroupedLinear(hold(child.weight), None, child.weight.dtype))


def _in_4_bits(weight: torch.Tensor) -> GroupedWeight:
    """Hold a weight as a checkpoint in w4a16 does: numbers of 4 bits in groups of 128, without zeros of their own."""
    by_group = weight.float().unflatten(1, (-1, min(128, weight.shape[1])))
    scales = by_group.abs().amax(2, keepdim=True) / 7
    numbers = ((by_group / scales).round() + 8).to(torch.uint8).flatten(1)
    zeros = torch.full_like(scales[:, :, 0], 8, dtype=torch.uint8)
    return GroupedWeight(4, numbers, scales[:, :, 0].half(), zeros)


def _in_float_blocks(weight: torch.Tensor) -> GroupedWeight:
    """Hold a weight as checkpoints in fp8 do: 8-bit floats with scales of blocks."""
    size = min(128, *weight.shape)
    blocks = weight.float().unflatten(0, (-1, size)).unflatten(2, (-1, size))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    numbers = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return GroupedWeight(8, numbers, scales[:, 0, :, 0].repeat_interleave(size, 0))


WEIGHTS: Mapping[str, Callable[[Any], object]] = MappingProxyType(
    {
        "fp8": replace_linears,
        "w4a16": lambda model: _grouped(model, _in_4_bits),
        "fp8-blocks": lambda model: _grouped(model, _in_float_blocks),
        "q8_0": lambda model: quantize_to_blocks(model, "q8_0", on_gpu=True),
    }
)
"""How weights in few bits are made of those of a model, in place."""


def ours_with_adapters(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The engine in process; the requests take turns with four LoRA adapters of rank 16 on all layers."""
    loaded = load(shape, device, max(counts))
    adapters = [loaded.engine.load_adapter(random_adapter(shape)) for _ in range(4)]
    run = {"rates": measure(lambda count: decode(loaded, count, tokens, adapters=adapters), counts, tokens)}
    return run | _memory(device)


def random_adapter(shape: str) -> dict[str, LoraPair]:
    linears = {
        name: module for name, module in random_model(shape, "meta").named_modules() if type(module) is nn.Linear
    }
    return {
        name: LoraPair(torch.randn(_RANK, linear.in_features) / 100, torch.randn(linear.out_features, _RANK) / 100, 1.0)
        for name, linear in linears.items()
        if name != "lm_head"
    }


def ours_with_prompts(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """Prompt tokens per second of the engine in process, for so many prompts of 2,048 tokens, and one of 8,000."""
    loaded = load(shape, device, max(counts))
    long, short = (CONTEXT - 100, 2048) if device == "cuda" else (200, 50)
    seed = iter(range(10, 10**6))

    def run(count: int, length: int) -> float:
        parameters = SamplingParameters(max_new_tokens=1, ignore_eos=True)
        for _ in range(count):
            prompt = [next(seed) % 40_000, *range(100, 99 + length)]
            loaded.engine.add("check", prompt, parameters, "", 3, lambda delta: None)
        began = time.perf_counter()
        while loaded.engine.has_work:
            loaded.engine.step()
        return count * length / (time.perf_counter() - began)

    run(max(counts), short)
    rates = {count: statistics.median(run(count, short) for _ in range(generation.RUNS)) for count in counts}
    return {"rates": rates, "long": statistics.median(run(1, long) for _ in range(generation.RUNS))} | _memory(device)


def ours(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The engine in process: no HTTP, one thread."""
    loaded = load(shape, device, max(counts))

    def run(count: int) -> None:
        decode(loaded, count, tokens)

    result: Result = {"rates": measure(run, counts, tokens), "details": loaded.details}
    result["sampled"] = measure(lambda count: decode(loaded, count, tokens, sampled=True), counts[-1:], tokens)
    return result | _memory(device)


def ours_over_http(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The server in a process of its own, streaming."""
    texts = [f"Number {number}: write what a child should know about it, first of all" for number in range(max(counts))]
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(shape, Path(directory), device)
        if device == "cuda":
            torch.cuda.empty_cache()
        with serving(Path(directory), max(counts)) as server:

            def run(count: int) -> None:
                parameters = {"max_new_tokens": tokens, "ignore_eos": True}
                bodies = [{"inputs": text, "parameters": parameters, "stream": True} for text in texts[:count]]
                asyncio.run(run_load(server.port, bodies, count, tokens, LMI))

            return {"rates": measure(run, counts, tokens)}


def generate(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """`model.generate` of transformers, in static batches."""
    model = random_model(shape, device)
    model.generation_config.eos_token_id = None

    def run(count: int) -> None:
        ids = torch.tensor(prompts(count), device=device)
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=2
        )
        assert out.shape[1] == PROMPT + tokens

    return {"rates": measure(run, counts, tokens)} | _memory(device)


def continuous(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = random_model(shape, device)
    model.set_attn_implementation("sdpa")
    generation = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=2048, page_size=32, max_batch_tokens=2048, auto_switch_to_flash=False)

    def run(count: int) -> None:
        out = model.generate_batch(
            prompts(count), generation_config=generation, continuous_batching_config=sizes, progress_bar=False
        )
        assert [len(answer.generated_tokens) for answer in out.values()] == [tokens] * count

    return {"rates": measure(run, counts, tokens)} | _memory(device)


def bandwidth(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The most tokens per second of one request: a step reads each weight once. Memory is measured by a copy."""
    size = 2**31 if device == "cuda" else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def copies(count: int) -> None:
        for _ in range(count):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copies(3)
    began = time.perf_counter()
    copies(20)
    rate = 20 * 2 * size / (time.perf_counter() - began)
    read = bytes_per_step(random_model(shape, "meta"))
    return {"rates": {1: rate / read}, "bytes_per_second": rate, "bytes_per_step": read}


def _size(model: Any) -> int:
    return sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))


def _memory(device: str) -> Result:
    return {"peak_gib": torch.cuda.max_memory_allocated() / _GIB} if device == "cuda" else {}


CONTENDERS: Mapping[str, Callable[[str, str, int, list[int]], Result]] = MappingProxyType(
    {
        "ours": ours,
        **{name: partial(ours_with, name) for name in WEIGHTS},
        "adapters": ours_with_adapters,
        "prompts": ours_with_prompts,
        "http": ours_over_http,
        "generate": generate,
        "continuous": continuous,
        "bandwidth": bandwidth,
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("shape")
    parser.add_argument("device")
    parser.add_argument("tokens", type=int)
    parser.add_argument("counts", type=int, nargs="+")
    asked = parser.parse_args()
    print(json.dumps(CONTENDERS[asked.contender](asked.shape, asked.device, asked.tokens, asked.counts)))


if __name__ == "__main__":
    main()
