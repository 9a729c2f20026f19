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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.generation import serving
from benchmarks.load import LMI, run_load
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedEngine, LoadedModel, load_engine
from lmi_server.contract.generation import SamplingParameters
from scripts.gpu_check.shapes import CONTEXT, bytes_per_step, random_model, tokenizer, write_checkpoint

RUNS = 3
PROMPT = 20  # tokens
_GIB = 2**30

Run = Callable[[int], None]
"""Generates for so many requests at once."""
Result = dict[str, Any]


def prompts(count: int) -> list[list[int]]:
    """Return prompts that share no prefix."""
    return [[10 + number, *range(100, 99 + PROMPT)] for number in range(count)]


def measure(run: Run, counts: list[int], tokens: int) -> dict[int, float]:
    """Return the median of the tokens per second for each count."""
    run(min(2, max(counts)))
    rates = {}
    for count in counts:
        seconds = []
        for _ in range(RUNS):
            began = time.perf_counter()
            run(count)
            seconds.append(time.perf_counter() - began)
        rates[count] = count * tokens / statistics.median(seconds)
    return rates


def load(shape: str, device: str, slots: int) -> LoadedEngine:
    """Return this project's engine over a random model, as the handler makes it of a checkpoint."""
    options = HuggingFaceOptions(dtype="bf16", max_rolling_batch_size=slots)
    model = random_model(shape, device)
    weights = {torch.device(device, 0) if device == "cuda" else torch.device(device): _size(model)}
    return load_engine(lambda: LoadedModel(model, tokenizer(), CONTEXT, weights), options)


def add(loaded: LoadedEngine, count: int, tokens: int, sampled: bool = False) -> list[Any]:
    """Add requests; return the list that gets their deltas."""
    deltas: list[Any] = []
    for number, prompt in enumerate(prompts(count)):
        drawn = {"do_sample": True, "top_p": 0.9, "seed": number} if sampled else {}
        parameters = SamplingParameters(max_new_tokens=tokens, ignore_eos=True, **drawn)
        loaded.engine.add("check", prompt, parameters, "", 3, deltas.append)
    return deltas


def ours(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The engine in process: no HTTP, one thread."""
    loaded = load(shape, device, max(counts))

    def run(count: int, sampled: bool = False) -> None:
        deltas = add(loaded, count, tokens, sampled)
        while loaded.engine.has_work:
            loaded.engine.step()
        found = sum(len(delta.tokens) for delta in deltas)
        assert found == count * tokens, f"{found} tokens of {count * tokens} came"

    result: Result = {"rates": measure(run, counts, tokens), "details": loaded.details}
    result["sampled"] = measure(lambda count: run(count, sampled=True), counts[-1:], tokens)
    return result | _memory(device)


def ours_over_http(shape: str, device: str, tokens: int, counts: list[int]) -> Result:
    """The server in a process of its own, streaming."""
    texts = [f"Number {number}: write what a child should know about it, first of all" for number in range(max(counts))]
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(shape, Path(directory), device)
        if device == "cuda":
            torch.cuda.empty_cache()
        with serving(Path(directory), max(counts)) as (_, port):

            def run(count: int) -> None:
                parameters = {"max_new_tokens": tokens, "ignore_eos": True}
                bodies = [{"inputs": text, "parameters": parameters, "stream": True} for text in texts[:count]]
                asyncio.run(run_load(port, bodies, count, tokens, LMI))

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
    return sum(weight.nbytes for weight in model.parameters())


def _memory(device: str) -> Result:
    return {"peak_gib": torch.cuda.max_memory_allocated() / _GIB} if device == "cuda" else {}


CONTENDERS: Mapping[str, Callable[[str, str, int, list[int]], Result]] = MappingProxyType(
    {"ours": ours, "http": ours_over_http, "generate": generate, "continuous": continuous, "bandwidth": bandwidth}
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
