"""Compares a KV cache in 8 bits with one in bfloat16 on this CPU: tokens per second of long contexts, and perplexity.

    python -m benchmarks.kv_cache [--model DIR] [--turns 5] [--requests 1 8] [--context 2000 7000]
    python -m benchmarks.kv_cache --perplexity [--model DIR]

The model is loaded once for each value of option.kv_cache_dtype. The engines run in this process and take turns; the
table has the median of the turns, and its ratio to bfloat16. The perplexity is that of a fixed text whose tokens are
computed in chunks of 16, so that all but the first of them read the cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.few_bits import TEXT
from benchmarks.figures import in_turns, parser_of, show
from benchmarks.servers import MODEL
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import LoadedEngine, load_engine
from lmi_server.contract.generation import Delta, SamplingParameters

KINDS = ("auto", "int8", "fp8")
TOKENS = 24


def load(path: str, kind: str, requests: int, chunk: int | None = None) -> LoadedEngine:
    options = HuggingFaceOptions(
        dtype="bf16", kv_cache_dtype=kind, max_rolling_batch_size=requests, chunked_prefill_size=chunk
    )
    return load_engine(lambda: transformers_model.load(path, options), options)


def seconds_per_step(loaded: LoadedEngine, requests: int, context: int) -> float:
    """Return how long a step takes that decodes `requests` sequences of `context` tokens, after the first turn cached.

    A prompt differs from the others in its first token, so that each sequence has a cache of its own.
    """
    for number in range(requests):
        prompt = [number + 3, *(10 + (7 * place) % 1000 for place in range(context - 1))]
        sampling = SamplingParameters(max_new_tokens=TOKENS, ignore_eos=True)
        loaded.engine.add(f"{number}", prompt, sampling, "", 3, lambda _: None)
    while loaded.engine.stats.waiting or loaded.engine.stats.running < requests:
        loaded.engine.step()
    loaded.engine.step()
    took = []
    while loaded.engine.has_work:
        began = time.perf_counter()
        loaded.engine.step()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def perplexity(path: str, kind: str) -> float:
    loaded, found = load(path, kind, 1, chunk=16), list[Delta]()
    ids = AutoTokenizer.from_pretrained(path)(TEXT).input_ids
    sampling = SamplingParameters(max_new_tokens=1, prompt_logprobs=0)
    loaded.engine.add("text", ids, sampling, "", 3, lambda output: found.append(output))  # type: ignore[arg-type]
    while loaded.engine.has_work:
        loaded.engine.step()
    tokens = next(delta.prompt_tokens for delta in found if delta.prompt_tokens)
    scores = [token.logprob for token in tokens if token.logprob is not None]
    return math.exp(-statistics.fmean(scores))


def compare(path: str, turns: int, counts: list[int], contexts: list[int]) -> None:
    engines = {kind: load(path, kind, max(counts)) for kind in KINDS}
    cells: dict[str, list[str]] = {kind: ["bf16" if kind == "auto" else kind] for kind in KINDS}
    cases = list(itertools.product(counts, contexts))
    for requests, context in cases:
        runs = {kind: partial(seconds_per_step, engine, requests, context) for kind, engine in engines.items()}
        found = {kind: statistics.median(took) for kind, took in in_turns(turns, runs, warm=False).items()}
        for kind, took in found.items():
            cells[kind].append(f"{requests / took:.0f} tokens/s, {found['auto'] / took:.2f} x")
    for kind, row in cells.items():
        row.append(f"{engines[kind].engine._runner.cache.bytes_per_token:,}")  # type: ignore[attr-defined]
    columns = (f"{requests} x {context} tokens" for requests, context in cases)
    show(("KV cache", *columns, "bytes per token"), list(cells.values()), width=160)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[2000, 7000])
    parser.add_argument("--perplexity", action="store_true", help="print this alone")
    options = parser.parse_args()
    path = str(options.model)
    if options.perplexity:
        show(("KV cache", "perplexity"), [(kind, f"{perplexity(path, kind):.3f}") for kind in KINDS])
    else:
        compare(path, options.turns, options.requests, options.context)


if __name__ == "__main__":
    main()
