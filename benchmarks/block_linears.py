"""Linear layers of blocks for few rows: multiplied as integers of 16 bits, and in float32.

    python -m benchmarks.block_linears [--model DIR] [--turns 15] [--rows 1,2,4,8]

With AVX-512 VNNI the kernels multiply rows of bfloat16 as integers, and rows of float32 as they are. Both passes go
through all linear layers of the demo model but the head, read the same weights, and take turns. The table has the
medians of the turns, and the median of their ratios: what multiplying integers saves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.figures import in_turns, parser_of, ratios, show
from benchmarks.servers import MODEL
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.cpu_kernels.blocks import integers
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS
from handlers.rolling_batch.cpu.large_pages import use_large_pages

KINDS = ("q8_0", "q4_0", "q4_k")
_ALL_ROWS = 1000


def layers(path: str, kind: str) -> list[BlockLinear]:
    """Return the linear layers of a model in blocks."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.lm_head = nn.Identity()
    quantize_to_blocks(model, kind)
    found = [module for module in model.modules() if isinstance(module, BlockLinear)]
    use_large_pages(module.laid for module in found)
    for module in found:
        module.laid[EXACT_ROWS] = _ALL_ROWS
    return found


def in_float32(linear: BlockLinear) -> BlockLinear:
    """Return a layer of the same memory for rows of float32."""
    widths = (linear.in_features, linear.out_features)
    return BlockLinear(linear.laid, widths, linear.formats, None, torch.float32)


def seconds(linears: Sequence[BlockLinear], rows: int) -> float:
    """Return how long some rows take through all layers."""
    inputs = {linear.in_features: torch.randn((rows, linear.in_features)).to(linear.dtype) for linear in linears}
    began = time.perf_counter()
    for linear in linears:
        linear(inputs[linear.in_features])
    return time.perf_counter() - began


def measure(path: str, kind: str, counts: Sequence[int], turns: int) -> Iterator[tuple[int, float, float, float]]:
    """Yield for each number of rows: the medians in integers and in float32, in seconds, and the median ratio."""
    whole = layers(path, kind)
    floats = [in_float32(linear) for linear in whole]
    for rows in counts:
        runs = {"integers": partial(seconds, whole, rows), "float32": partial(seconds, floats, rows)}
        ours, theirs = in_turns(turns, runs).values()
        yield rows, median(ours), median(theirs), ratios(ours, theirs)[0]


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rows", default="1,2,4,8")
    options = parser.parse_args()
    if not integers.IS_USABLE:
        print("this processor has no AVX-512 VNNI: rows of bfloat16 are multiplied in float32, too")
    counts = list(map(int, options.rows.split(",")))
    table: list[tuple[str, ...]] = []
    with torch.inference_mode():
        for kind in KINDS:
            for rows, ours, theirs, ratio in measure(str(options.model), kind, counts, options.turns):
                table.append((kind, f"{rows}", f"{1e3 * ours:.2f} ms", f"{1e3 * theirs:.2f} ms", f"{ratio:.2f}"))
    show(("weights", "rows", "integers", "float32", "ratio"), table, width=100)


if __name__ == "__main__":
    main()
