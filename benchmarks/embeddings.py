"""Measures embeddings with all-MiniLM-L6-v2: this server over HTTP, beside libraries that compute the same vectors.

    python -m benchmarks.embeddings

The texts have 3 to 120 words. sentence-transformers gets one text per call, as in a server without batches; and batches
of 32 texts that are ready in advance, which no server can have. The pipeline of transformers gets one text per call.
Each contender has its own process and two runs; the better one counts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import parser_of, run_apart, show
from benchmarks.load import run_load
from benchmarks.servers import serving

MODEL = Path("models/all-minilm-l6-v2")
TEXTS = 256
RUNS = 2
CLIENTS = (1, 16, 64)
_WORDS = (
    "river",
    "engine",
    "bread",
    "moon",
    "chess",
    "whale",
    "paper",
    "steel",
    "under",
    "makes",
    "blue",
    "seven",
    "when",
)


def texts(count: int = TEXTS) -> list[str]:
    """Return texts like those of searches and passages: most of them are short."""
    numbers = random.Random(5)
    return [" ".join(numbers.choices(_WORDS, k=min(120, int(3 + numbers.expovariate(1 / 25))))) for _ in range(count)]


def rate_of(embed: Callable[[list[str]], object]) -> float:
    """Return texts per second."""
    embed(texts(8))
    rates = []
    for _ in range(RUNS):
        began = time.perf_counter()
        embed(texts())
        rates.append(TEXTS / (time.perf_counter() - began))
    return max(rates)


# --- the others ---


def sentence_transformers_alone() -> float:
    model = _sentence_transformer()
    return rate_of(lambda batch: [model.encode(text) for text in batch])


def sentence_transformers_in_batches() -> float:
    model = _sentence_transformer()
    return rate_of(lambda batch: model.encode(batch, batch_size=32))


def _sentence_transformer():  # type: ignore[no-untyped-def]
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(MODEL), device="cpu")


def pipeline_alone() -> float:
    import torch
    from transformers import pipeline

    extract = pipeline("feature-extraction", model=str(MODEL), device="cpu")

    def embed(text: str) -> list[float]:
        mean = torch.tensor(extract(text)[0]).mean(0)
        vector: list[float] = (mean / mean.norm()).tolist()
        return vector

    return rate_of(lambda batch: [embed(text) for text in batch])


# --- this server ---


async def _load(port: int, clients: int, batch: list[str]) -> None:
    bodies = [{"input": text, "model": "all_minilm_l6_v2", "encoding_format": "base64"} for text in batch]
    await run_load(port, bodies, clients, path="/v1/embeddings")


def over_http(clients: int) -> float:
    with serving(MODEL) as server:
        return rate_of(lambda batch: asyncio.run(_load(server.port, clients, batch)))


CONTENDERS: dict[str, Callable[[], float]] = {
    "pipeline of transformers, text by text": pipeline_alone,
    "sentence-transformers, text by text": sentence_transformers_alone,
    "sentence-transformers, batches of 32": sentence_transformers_in_batches,
    **{f"lmi-server, HTTP, {count} clients": lambda count=count: over_http(count) for count in CLIENTS},  # type: ignore[misc]
}
BASELINE = "sentence-transformers, text by text"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--contender", choices=CONTENDERS)
    chosen = parser.parse_args().contender
    if chosen is not None:
        print(CONTENDERS[chosen]())
        return
    rates = {name: run_apart("benchmarks.embeddings", "--contender", name) for name in CONTENDERS}
    rows = [(name, f"{rate:.0f}", f"{rate / rates[BASELINE]:.2f}") for name, rate in rates.items()]
    show(("", "texts/s", "ratio"), rows, f"{TEXTS} texts, all-MiniLM-L6-v2")


if __name__ == "__main__":
    main()
