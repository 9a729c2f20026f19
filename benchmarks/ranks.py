"""Measures two MPI ranks on two cores beside one rank on one core: this server over HTTP, streaming.

    python -m benchmarks.ranks

The model is a Llama of random weights in bfloat16, about as large as SmolLM2-135M, whose heads two ranks can share. The
single rank computes on one core; the front end and the client take the other one, where there are two. Also measured:
what the message to the other ranks costs of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.generation import CONCURRENCIES, MODEL, measure, serving, stream_all

ONE, TWO = "one rank on one core", "two ranks on two cores"
ROWS = 32
_MESSAGES = 1000


def make_model(directory: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=2048, eos_token_id=0, **sizes, **heads)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


@contextlib.contextmanager
def configured(weights: Path, *lines: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        common = (f"option.model_id={weights}", "option.rolling_batch=scheduler", "option.kv_cache_memory_gb=0.5")
        (Path(directory) / "serving.properties").write_text("\n".join((*common, *lines)))
        yield Path(directory)


def one_rank(weights: Path) -> dict[int, list[float]]:
    with configured(weights, "option.threads=1") as model, serving(model, 64) as (server, port):
        for worker in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
            for thread in Path(f"/proc/{worker}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {0})
        return measure(lambda count: asyncio.run(stream_all(port, count)))


def two_ranks(weights: Path) -> dict[int, list[float]]:
    keys = ("engine=MPI", "option.tensor_parallel_degree=2")
    with configured(weights, *keys) as model, serving(model, 64) as (_, port):
        return measure(lambda count: asyncio.run(stream_all(port, count)))


def message_seconds() -> float:
    """Return what rank 0 spends on telling one other rank a step of ROWS sequences."""
    command = ["mpirun", "-np", "2", "--allow-run-as-root", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    command[0] = str(Path(sys.executable).with_name("mpirun"))
    finished = subprocess.run(
        [*command, sys.executable, "-m", "benchmarks.ranks", "--messages"], stdout=subprocess.PIPE, check=True
    )
    return float(json.loads(finished.stdout.decode().strip().rpartition("\n")[2]))


def send_messages() -> None:
    from mpi4py import MPI

    from handlers.ranks.communicator import Communicator
    from handlers.rolling_batch.runner.step_messages import Pass, encode
    from lmi_server.contract.ranks import Rank

    rank = MPI.COMM_WORLD.rank
    communicator = Communicator(Rank(rank, 2, ""))
    rows = list(range(ROWS))
    spent = []
    for _ in range(_MESSAGES):
        MPI.COMM_WORLD.Barrier()
        if rank:
            communicator.receive()
            continue
        began = time.perf_counter()
        communicator.broadcast(encode(Pass([40_000] * ROWS, [1000] * ROWS, rows, [], rows, [], [])))
        spent.append(time.perf_counter() - began)
    if not rank:
        print(json.dumps(statistics.median(spent)))


def main() -> None:
    if "--messages" in sys.argv:
        send_messages()
        return
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        one, two = one_rank(Path(directory)), two_ranks(Path(directory))
    shown = Table(title="Output tokens/s of a Llama of 130 million random weights (bf16)")
    for head in ("", *(f"{concurrency} at once" for concurrency in CONCURRENCIES)):
        shown.add_column(head)
    medians = {name: [statistics.median(rates[c]) for c in CONCURRENCIES] for name, rates in ((ONE, one), (TWO, two))}
    shown.add_row(ONE, *(f"{rate:.0f}" for rate in medians[ONE]))
    ratios = (b / a for a, b in zip(medians[ONE], medians[TWO], strict=True))
    shown.add_row(TWO, *(f"{rate:.0f} ({ratio:.2f}x)" for rate, ratio in zip(medians[TWO], ratios, strict=True)))
    Console().print(shown)
    spent, step = message_seconds(), ROWS / medians[TWO][CONCURRENCIES.index(ROWS)]
    print(f"telling the other rank a step of {ROWS} rows: {spent * 1e6:.0f} us, {spent / step:.2%} of the step")


if __name__ == "__main__":
    main()
