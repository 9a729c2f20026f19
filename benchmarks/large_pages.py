"""Measures what large pages save: one row through layers of bfloat16, with pages of 4 KiB and with large ones.

    python -m benchmarks.large_pages [--mib 256] [--pairs 15]

Both sets of layers have the same shape and as many weights, more than caches hold; passes alternate.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import nn

from benchmarks.figures import in_turns, parser_of, ratios
from handlers.rolling_batch.cpu.large_pages import use_large_pages
from handlers.rolling_batch.cpu.linears import TiledLinear

WIDTH = 1024


def layers(mib: int) -> list[TiledLinear]:
    """Return layers whose weights take `mib` MiB in all."""
    count = max(1, mib * 2**20 // (2 * WIDTH * WIDTH))
    return [TiledLinear(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)) for _ in range(count)]


def seconds(linears: list[TiledLinear], hidden: torch.Tensor) -> float:
    """Return how long one row takes through all of them."""
    begin = time.perf_counter()
    for linear in linears:
        hidden = linear(hidden)
    return time.perf_counter() - begin


def main() -> None:
    """Print both medians and the median ratio."""
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    with torch.inference_mode():
        small, large = layers(arguments.mib), layers(arguments.mib)
        moved = use_large_pages(linear.laid for linear in large)
        hidden = torch.ones((1, WIDTH), dtype=torch.bfloat16)
        runs = {"small": partial(seconds, small, hidden), "large": partial(seconds, large, hidden)}
        small_s, large_s = in_turns(arguments.pairs, runs).values()
    small_ms, large_ms = (1e3 * statistics.median(times) for times in (small_s, large_s))
    ratio, _, _ = ratios(small_s, large_s)
    print(
        f"{arguments.mib} MiB, {moved} large pages: {small_ms:.1f} ms, {large_ms:.1f} ms with them, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
