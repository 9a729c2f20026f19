"""Linear layers of blocks: in bfloat16, multiplied as integers of 16 bits, in float32, and with activations in 8 bits.

    python -m benchmarks.block_linears [--model DIR] [--turns 15] [--rows 1,2,4,8] [--kinds q8_0] [--unpacked] [--tiles]

With AVX-512 VNNI the kernels multiply rows of bfloat16 as integers, and rows of float32 as they are. With
option.activation_dtype=int8 they round rows to 8 bits. All passes go through all linear layers of the demo model but
the head, and take turns. The table has the medians of the turns, and the median of their ratios to the integers of 16
bits, which are those of unpacked weights with `--unpacked`. The last column is of the plain layers in bfloat16. With
`--kinds int8 --tiles` rows in 8 bits are multiplied as bytes in tile registers, if the processor has these.
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
from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.cpu_kernels import amx
from handlers.cpu_kernels.blocks import integers
from handlers.rolling_batch.cpu.large_pages import use_large_pages
from handlers.rolling_batch.cpu.linears import TiledLinear

KINDS = ("q8_0", "q4_0", "q4_k")
_ALL_ROWS = 1000


def layers(
    path: str, kind: str, exact_rows: int, rounded_rows: int
) -> tuple[list[TiledLinear], list[BlockLinear], list[BlockLinear]]:
    """Return the linear layers of a model: plain, in blocks, and in blocks with activations in 8 bits."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.lm_head = nn.Identity()
    plain = [TiledLinear(module) for module in model.modules() if type(module) is nn.Linear]
    quantize_to_blocks(model, kind)
    found = [module for module in model.modules() if isinstance(module, BlockLinear)]
    rounding: list[BlockLinear] = [Int8BlockLinear.from_linear(module) for module in found]
    use_large_pages(module.laid for module in (*plain, *found, *rounding))
    for modules, rows in ((found, exact_rows), (rounding, rounded_rows)):
        for module in modules:
            module.limit_exact_rows(rows)
            module.limit_unpacked_rows(0)
    return plain, found, rounding


def in_float32(linear: BlockLinear) -> BlockLinear:
    """Return a layer of the same memory for rows of float32."""
    widths = (linear.in_features, linear.out_features)
    return BlockLinear(linear.laid, widths, linear.formats, None, torch.float32)


def seconds(linears: Sequence[BlockLinear | TiledLinear], rows: int) -> float:
    """Return how long some rows take through all layers."""
    inputs = {
        linear.in_features: torch.randn((rows, linear.in_features)).to(getattr(linear, "dtype", torch.bfloat16))
        for linear in linears
    }
    began = time.perf_counter()
    for linear in linears:
        linear(inputs[linear.in_features])
    return time.perf_counter() - began


def measure(
    path: str, kind: str, counts: Sequence[int], turns: int, exact_rows: int, rounded_rows: int
) -> Iterator[tuple[str, ...]]:
    """Yield for each number of rows: the median in integers of 16 bits, and that of the other ways with its ratio."""
    plain, whole, rounding = layers(path, kind, exact_rows, rounded_rows)
    passes = (whole, [in_float32(linear) for linear in whole], rounding, plain)
    for rows in counts:
        runs = {f"{place}": partial(seconds, linears, rows) for place, linears in enumerate(passes)}
        first, *others = in_turns(turns, runs).values()
        cells = [f"{1e3 * median(other):.2f} ms, {ratios(other, first)[0]:.2f} x" for other in others]
        yield kind, f"{rows}", f"{1e3 * median(first):.2f} ms", *cells


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--unpacked", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    if not integers.IS_USABLE:
        print("this processor has no AVX-512 VNNI: rows of bfloat16 are multiplied in float32, too")
    if options.tiles and (options.kinds != "int8" or not amx.MULTIPLIES_BYTES):
        parser.error("--tiles is for --kinds int8, on a processor with amx_int8")
    counts = list(map(int, options.rows.split(",")))
    table: list[tuple[str, ...]] = []
    with torch.inference_mode():
        for kind in options.kinds.split(","):
            exact_rows, rounded_rows = (0 if given else _ALL_ROWS for given in (options.unpacked, options.tiles))
            table.extend(measure(str(options.model), kind, counts, options.turns, exact_rows, rounded_rows))
    head = "unpacked" if options.unpacked else "16 bits"
    show(("weights", "rows", head, "float32", "8 bits", "bfloat16"), table, width=110)


if __name__ == "__main__":
    main()
