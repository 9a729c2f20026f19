"""Attention over a KV cache in pages on a GPU: the bandwidth of decoding, and the rate of prompts.

    python -m benchmarks.gpu_attention           # the shape of Llama 3 8B, in bfloat16, under 30 s
    python -m benchmarks.gpu_attention --sweep prompts   # or decode: with other tiles, warps and stages

Launches are recorded in a CUDA graph and replayed, so that the time of Python between launches is not measured. Each
is of a layer of its own, as in a model, so that the one before leaves no keys or values in the cache of the GPU.
The bytes are those of the keys and values that the rows see. The peak is that of copying 1 GiB in the same process, and
beside each figure stands that of torch's attention over contiguous keys and values of the same sizes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.pages import cudnn, launch
from handlers.rolling_batch.pages.launch import PageLayer, Tuning

LAYER = PageLayer(heads=32, kv_heads=8, dim=128, value_dim=128, page=32)
DTYPE = torch.bfloat16
BATCHES, CONTEXTS = (1, 8, 64), (512, 8192)
PROMPTS = ((2048, 0), (8192, 0), (2048, 8192), (128, 2048))  # rows of a chunk, tokens before it
_LAYERS_BYTES = 2**28  # of keys and values of one measurement at least, several times the cache of a GPU
_REPEATS = 7


def require_gpu(benchmark: str) -> None:
    """End the process where there is no GPU to measure."""
    if not torch.cuda.is_available():
        print(f"{benchmark} needs a GPU by NVIDIA", file=sys.stderr)
        sys.exit()


def seconds(runs: list[Callable[[], object]]) -> float:
    """Return the median time of one of `runs`, recorded together."""
    for run in runs[:1]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(runs))
    return statistics.median(times)


class Pages:
    """Keys and values of `layers` layers for `batch` sequences of `context` tokens, in pages in a random order."""

    def __init__(self, batch: int, context: int, layers: int, layer: PageLayer = LAYER) -> None:
        self.layer = layer
        per_sequence = -(-context // layer.page)
        count = batch * per_sequence
        self.tables = torch.randperm(count, device="cuda").int().view(batch, per_sequence)
        shape = (layers, count, layer.kv_heads, layer.page, layer.dim)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
        self.slots = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.positions = torch.full_like(self.slots, context - 1)
        self.layers = layers


def layers_for(batch: int, context: int, layer: PageLayer = LAYER) -> int:
    """Return how many layers are too much for the cache of the GPU."""
    return max(2, min(64, _LAYERS_BYTES // seen_bytes(batch, context, layer)))


def seen_bytes(batch: int, context: int, layer: PageLayer = LAYER) -> int:
    """Return the bytes of the keys and values that the rows of a layer see."""
    return batch * context * layer.kv_heads * 2 * layer.dim * DTYPE.itemsize


def decode_seconds(pages: Pages, tuning: Tuning) -> float:
    """Return the time of one layer, with the write of the new keys and values."""
    batch = len(pages.slots)
    query = torch.randn(batch, LAYER.heads, LAYER.dim, dtype=DTYPE, device="cuda")
    new = torch.randn(batch, LAYER.kv_heads, LAYER.dim, dtype=DTYPE, device="cuda")
    out = torch.empty_like(query)

    def layer(index: int) -> Callable[[], object]:
        kept = (pages.keys[index], pages.values[index], pages.tables, pages.slots, pages.positions)

        def run() -> None:
            launch.write(new, new, *kept, LAYER)
            launch.decode(query, *kept, batch, out, 0.1, LAYER, tuning)

        return run

    return seconds([layer(index) for index in range(pages.layers)])


def torch_decode_seconds(batch: int, context: int) -> float:
    """Return the time of torch's attention of one row for each sequence over contiguous keys and values."""
    layers = layers_for(batch, context)
    query = torch.randn(batch, LAYER.heads, 1, LAYER.dim, dtype=DTYPE, device="cuda")
    shape = (layers, batch, LAYER.kv_heads, context, LAYER.dim)
    keys, values = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))

    def layer(index: int) -> Callable[[], object]:
        return lambda: functional.scaled_dot_product_attention(query, keys[index], values[index], enable_gqa=True)

    return seconds([layer(index) for index in range(layers)])


def prompt_seconds(rows: int, before: int, tuning: Tuning) -> tuple[float, float]:
    """Return the times of a chunk by the kernel and by torch's attention, which sees the same columns.

    Without tokens before the chunk, torch's is cuDNN's as the rolling batch calls it.
    """
    pages = Pages(1, before + rows, 2)
    query = torch.randn(rows, LAYER.heads, LAYER.dim, dtype=DTYPE, device="cuda")
    out = torch.empty_like(query)
    described = torch.tensor([[0, rows, before, 0]], dtype=torch.int32, device="cuda")

    def ours() -> None:
        kept = (pages.keys[0], pages.values[0], pages.tables)
        launch.chunks(query, *kept, described, rows, out, 0.1, LAYER, tuning)

    if not before:
        new = torch.randn(2, rows, LAYER.kv_heads, LAYER.dim, dtype=DTYPE, device="cuda")
        terms = AttentionTerms(0.1)
        return seconds([ours] * 4), seconds([lambda: cudnn.attend(States(query, *new), [(0, rows)], terms, out)] * 4)
    queries = query.transpose(0, 1)[None].contiguous()
    shape = (1, LAYER.heads, before + rows, LAYER.dim)  # torch's fastest kernel takes as many heads of keys
    keys, values = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))

    def theirs() -> object:  # which has no mask for a chunk behind others, and computes all columns
        return functional.scaled_dot_product_attention(queries, keys, values)

    return seconds([ours] * 4), seconds([theirs] * 4)


def peak() -> float:
    """Return bytes per second read and written by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(50):  # the clocks of an idle GPU rise
        target.copy_(source)
    return 2 * 2**30 / seconds([lambda: target.copy_(source)])


def sweep(tuning: Tuning) -> Iterator[Tuning]:
    """Yield other choices of tiles, warps and stages for decoding."""
    for tile, stages, warps, programs in itertools.product((32, 64, 128), (2, 3, 4), (4, 8), (8,)):
        yield replace(tuning, decode_tile=tile, decode_stages=stages, decode_warps=warps, programs=programs)
    for programs in (2, 4, 16):
        yield replace(tuning, programs=programs)


def prompt_sweep(tuning: Tuning) -> Iterator[Tuning]:
    """Yield other choices of rows, tiles, warps and stages for prompts."""
    for rows, tile, stages, warps in (
        (128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 2, 8), (128, 128, 3, 8), (128, 64, 3, 4), (64, 64, 3, 4)
    ):  # fmt: skip
        yield replace(tuning, chunk_rows=rows, chunk_tile=tile, chunk_stages=stages, chunk_warps=warps)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=("decode", "prompts"), help="try other tiles, warps and stages")
    arguments = parser.parse_args()
    require_gpu("gpu_attention")
    device = torch.device("cuda")
    tuning, most = Tuning.from_torch(device), peak()
    print(f"{torch.cuda.get_device_name()}: a copy moves {most / 1e9:.0f} GB/s")
    print(f"{'decode: batch':>14} {'context':>8} {'us':>8} {'GB/s':>7} {'of copy':>8} {'torch us':>9}")
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        pages = Pages(batch, context, layers_for(batch, context))
        took = decode_seconds(pages, tuning)
        rate = seen_bytes(batch, context) / took
        other = torch_decode_seconds(batch, context) * 1e6
        print(f"{batch:>14} {context:>8} {took * 1e6:>8.1f} {rate / 1e9:>7.0f} {rate / most:>8.0%} {other:>9.1f}")
        if arguments.sweep == "decode":
            for choice in sweep(tuning):
                took = decode_seconds(pages, choice) * 1e6
                print(f"{took:>32.1f} us with {choice}")
    print(f"{'prompt: rows':>14} {'before':>8} {'us':>8} {'TFLOPS':>7} {'torch us':>18}")
    for rows, before in PROMPTS:
        took, other = prompt_seconds(rows, before, tuning)
        products = 4 * LAYER.heads * LAYER.dim * rows * (before + (rows + 1) / 2)
        print(f"{rows:>14} {before:>8} {took * 1e6:>8.1f} {products / took / 1e12:>7.0f} {other * 1e6:>18.1f}")
        for choice in prompt_sweep(tuning) if arguments.sweep == "prompts" and rows > 1024 else ():
            took = prompt_seconds(rows, before, choice)[0] * 1e6
            print(f"{took:>32.1f} us with {choice}")


if __name__ == "__main__":
    main()
