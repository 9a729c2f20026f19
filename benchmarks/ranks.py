"""Measures two MPI ranks on two cores beside one rank on one core: this server over HTTP, streaming.

    python -m benchmarks.ranks

The model is a Llama of random weights in bfloat16, about as large as SmolLM2-135M, whose heads two ranks can share. The
single rank computes on one core; the front end and the client take the other one, where there are two. Also measured:
what the message to the other ranks costs of a step.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import show
from benchmarks.generation import CONCURRENCIES, measure, stream_all
from benchmarks.servers import MODEL, model_directory, serving

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


def rates(weights: Path, cores: set[int] | None, *lines: str) -> dict[int, list[float]]:
    """Return tokens/s of a server with further lines, whose workers' threads run on `cores`."""
    options = {"model_id": weights, "rolling_batch": "scheduler", "kv_cache_memory_gb": 0.5}
    with model_directory(*lines, **options) as model, serving(model, 64) as server:
        for worker in server.pids()[1:] if cores else ():
            for thread in Path(f"/proc/{worker}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores or ())
        return measure(lambda count: asyncio.run(stream_all(server.port, count)))


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
        one = rates(Path(directory), {0}, "option.threads=1")
        two = rates(Path(directory), None, "engine=MPI", "option.tensor_parallel_degree=2")
    medians = {name: [statistics.median(rates[c]) for c in CONCURRENCIES] for name, rates in ((ONE, one), (TWO, two))}
    cells = [f"{b:.0f} ({b / a:.2f}x)" for a, b in zip(medians[ONE], medians[TWO], strict=True)]
    rows = [(ONE, *(f"{rate:.0f}" for rate in medians[ONE])), (TWO, *cells)]
    columns = ("", *(f"{concurrency} at once" for concurrency in CONCURRENCIES))
    show(columns, rows, "Output tokens/s of a Llama of 130 million random weights (bf16)")
    spent, step = message_seconds(), ROWS / medians[TWO][CONCURRENCIES.index(ROWS)]
    print(f"telling the other rank a step of {ROWS} rows: {spent * 1e6:.0f} us, {spent / step:.2%} of the step")


if __name__ == "__main__":
    main()
