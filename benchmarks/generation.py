"""Measures generation with the demo model: this server over HTTP, streaming, beside others that can serve it here.

    python -m benchmarks.generation [ours] [generate] [continuous] [vllm] [compiled]

Every contender generates 64 tokens for 1, 8, 32 and 64 prompts at once, in bfloat16, and ignores the end of sequence.
The contenders run one after the other, each in its own process; each figure is the median of three runs. Without names,
all contenders run. On a machine with a GPU all but vLLM's use it. Variables such as OPTION_ENABLE_CUDA_GRAPH=true set
options of this server.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import parser_of, run_apart, show
from benchmarks.load import LMI, run_load
from benchmarks.servers import MODEL, serving

CONCURRENCIES = (1, 8, 32, 64)
NEW_TOKENS = 64
RUNS = 3
OURS = "lmi-server, HTTP, streaming"
CORES = os.cpu_count() or 1


def prompts(count: int) -> list[str]:
    """Return prompts of about 20 tokens that share no prefix."""
    topics = ("rivers", "engines", "bread", "the moon", "chess", "whales", "paper", "steel")
    return [
        f"Number {index}: write what a child should know about {topics[index % 8]}, first of all"
        for index in range(count)
    ]


def measure(
    run: Callable[[int], None], counts: Sequence[int] = CONCURRENCIES, tokens: int = NEW_TOKENS
) -> dict[int, list[float]]:
    """Return tokens per second of each run at each of `counts`; `run(count)` generates for `count` prompts at once."""
    run(min(2, max(counts)))
    rates: dict[int, list[float]] = {}
    for count in counts:
        rates[count] = []
        for _ in range(RUNS):
            began = time.perf_counter()
            run(count)
            rates[count].append(count * tokens / (time.perf_counter() - began))
    return rates


# --- the contenders ---


def ours() -> dict[int, list[float]]:
    with serving(MODEL, 64) as server:
        return measure(lambda count: asyncio.run(stream_all(server.port, count)))


async def stream_all(port: int, count: int) -> None:
    """Read so many streamed answers at once to their ends; fail if tokens are missing."""
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    bodies = [{"inputs": prompt, "parameters": parameters, "stream": True} for prompt in prompts(count)]
    await run_load(port, bodies, count, NEW_TOKENS, LMI)


def load_transformers(**settings: Any) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(CORES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, **settings).to(device).eval()
    model.generation_config.eos_token_id = None
    return model, tokenizer


def padded_generate() -> dict[int, list[float]]:
    model, tokenizer = load_transformers()

    def run(count: int) -> None:
        batch = tokenizer(prompts(count), return_tensors="pt", padding=True).to(model.device)
        out = model.generate(
            **batch, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id or 0
        )
        assert out.shape[1] == batch["input_ids"].shape[1] + NEW_TOKENS

    return measure(run)


def transformers_continuous_batching() -> dict[int, list[float]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, tokenizer = load_transformers(attn_implementation="sdpa")
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default vLLM takes nine tenths of the machine's memory.
    sizes = ContinuousBatchingConfig(num_blocks=256, page_size=32, max_batch_tokens=512, auto_switch_to_flash=False)

    def run(count: int) -> None:
        inputs = [tokenizer.encode(prompt) for prompt in prompts(count)]
        out = model.generate_batch(inputs, generation_config=generation, continuous_batching_config=sizes)
        assert [len(answer.generated_tokens) for answer in out.values()] == [NEW_TOKENS] * count

    return measure(run)


def vllm_in_process(compiled: bool) -> dict[int, list[float]]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(str(MODEL), dtype="bfloat16", enforce_eager=not compiled, max_num_seqs=64, max_model_len=2048)
    parameters = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def run(count: int) -> None:
        out = llm.generate(prompts(count), parameters, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in out] == [NEW_TOKENS] * count

    return measure(run)


CONTENDERS = {
    OURS: ours,
    "padded model.generate": padded_generate,
    "transformers' continuous batching": transformers_continuous_batching,
    "vLLM for the CPU, in process": functools.partial(vllm_in_process, compiled=False),
    "the same, compiled": functools.partial(vllm_in_process, compiled=True),
}
SHORT_NAMES = dict(zip(("ours", "generate", "continuous", "vllm", "compiled"), CONTENDERS, strict=True))


def ratio_rows(results: dict[str, dict[int, list[float]] | None]) -> list[list[str]]:
    """Return rows of tokens per second, with the ratio of ours to each other contender."""
    mine = results.get(OURS) or {}
    rows = []
    for name, rates in results.items():
        rows.append(row := [name])
        for concurrency in CONCURRENCIES:
            if rates is None:
                row.append("did not run")
                continue
            median = statistics.median(rates[concurrency])
            own = statistics.median(mine[concurrency]) if mine and name != OURS else None
            row.append(f"{median:.0f}" + (f" ({own / median:.2f}x)" if own else ""))
    return rows


def run_contender(name: str) -> dict[int, list[float]] | None:
    """Run a contender in its own process. Return None if it cannot run here; the reason is on standard error."""
    try:
        rates = run_apart("benchmarks.generation", "--contender", name)
    except subprocess.CalledProcessError as error:
        print(f"{name}: failed with exit code {error.returncode}", file=sys.stderr)
        return None
    return {int(concurrency): found for concurrency, found in rates.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", choices=("all", *SHORT_NAMES), default="all", help="the contenders")
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this one and print its rates as JSON")
    arguments = parser.parse_args()
    if arguments.contender:
        print(json.dumps(CONTENDERS[arguments.contender]()))
        return
    names = CONTENDERS if "all" in arguments.names else [SHORT_NAMES[name] for name in arguments.names]
    title = f"Output tokens/s of SmolLM2-135M (bf16, {NEW_TOKENS} tokens); in brackets: ours divided by it"
    columns = ("", *(f"{concurrency} at once" for concurrency in CONCURRENCIES))
    show(columns, ratio_rows({name: run_contender(name) for name in names}), title)


if __name__ == "__main__":
    main()
