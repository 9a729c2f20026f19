"""Products by weights in few bits on a GPU, for few and many rows, beside torch's of weights in bfloat16.

    python -m benchmarks.gpu_grouped           # the shape of Llama 3 8B, in bfloat16, under 60 s
    python -m benchmarks.gpu_grouped --sweep   # the kernel for few rows with other tiles

Launches are recorded in a CUDA graph and replayed. Each is of weights of its own, as in a model, so that the one before
leaves none in the cache of the GPU. Figures are microseconds: by one kernel that unpacks numbers on their way, by a
weight that is unpacked first, and by a plain layer. The last column is of the kernel for one row, with launches that
overlap where the GPU can.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_attention import peak, require_gpu, seconds
from benchmarks.gpu_linears import KINDS, Kind
from handlers.checkpoints.grouped.launch import Tiles, few_rows, unpacked
from handlers.checkpoints.grouped.layers import GroupedLinear, GroupedWeight
from handlers.rolling_batch.fused.one_row import multiply

DTYPE = torch.bfloat16
ROWS = (1, 8, 16, 32, 64, 128, 256)
_BYTES = 2**29  # of weights of one measurement at least, many times the cache of a GPU
_CHAINING = (9, 0)

Way = Callable[[Any, torch.Tensor], object]
"""Multiplies rows by a layer's weight."""


def in_4_bits(outputs: int, inputs: int) -> GroupedWeight:
    """Return a random weight of 4 bits in groups of 128."""
    scales = torch.rand(outputs, inputs // 128, dtype=torch.float16) / 64
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    return GroupedWeight(4, numbers, scales, torch.full_like(scales, 8, dtype=torch.uint8))


def with_zeros(outputs: int, inputs: int) -> GroupedWeight:
    """Return a random weight of 4 bits in groups of 128 that have zeros."""
    held = in_4_bits(outputs, inputs)
    zeros = torch.randint(16, held.scales.shape, dtype=torch.uint8)
    return GroupedWeight(4, held.numbers, held.scales, zeros)


def in_blocks_of_32(outputs: int, inputs: int) -> GroupedWeight:
    """Return a random weight of 8 bits as option.quantize=q8_0 has it."""
    scales = torch.rand(outputs, inputs // 32, dtype=torch.float16) / 1024
    numbers = torch.randint(256, (outputs, inputs), dtype=torch.uint8)
    return GroupedWeight(8, numbers, scales, torch.full_like(scales, 128, dtype=torch.uint8))


def in_floats(outputs: int, inputs: int) -> GroupedWeight:
    """Return a random weight of 8-bit floats in groups of 128."""
    scales = torch.rand(outputs, inputs // 128) / 64
    return GroupedWeight(8, torch.randn(outputs, inputs, dtype=DTYPE).to(torch.float8_e4m3fn), scales)


FORMS: dict[str, Callable[[int, int], GroupedWeight]] = {
    "4 bits": in_4_bits,
    "with zeros": with_zeros,
    "q8_0": in_blocks_of_32,
    "fp8": in_floats,
}


def sweep() -> Iterator[Tiles]:
    """Yield tiles of the kernel for few rows."""
    for outputs, warps, stages, waves in itertools.product((64, 128), (4, 8), (3, 5), (2, 4)):
        yield Tiles(outputs=outputs, warps=warps, stages=stages, waves=waves)
    yield Tiles(outputs=128, rows=128, warps=8)


def layers(kind: Kind, make: Callable[[int, int], GroupedWeight]) -> list[GroupedLinear]:
    with torch.device("cuda"):
        held = [make(kind.outputs, kind.inputs) for _ in range(4)]
        copies = max(4, _BYTES // (kind.outputs * kind.inputs * held[0].bits // 8))
        return [GroupedLinear(held[place % 4], None, DTYPE) for place in range(copies)]


def plain_seconds(kind: Kind) -> dict[int, float]:
    copies = max(2, _BYTES // (kind.outputs * kind.inputs))
    with torch.device("cuda"):
        linears = [nn.Linear(kind.inputs, kind.outputs, bias=False, dtype=DTYPE) for _ in range(copies)]
    return {count: timed(linears, lambda linear, rows: linear(rows), rows_of(kind, count)) for count in ROWS}


def timed(linears: Sequence[Any], way: Way, rows: torch.Tensor) -> float:
    """Return the seconds of a product."""
    return seconds([lambda linear=linear: way(linear, rows) for linear in linears])


def rows_of(kind: Kind, count: int) -> torch.Tensor:
    return torch.randn(count, kind.inputs, dtype=DTYPE, device="cuda")


def print_sweep(kind: Kind, linears: list[GroupedLinear]) -> None:
    for count in (16, 64):
        rows = rows_of(kind, count)
        took = {
            tiles: timed(linears, lambda linear, rows, tiles=tiles: few_rows(rows, linear, tiles), rows)
            for tiles in sweep()
        }
        for tiles, each in sorted(took.items(), key=lambda pair: pair[1])[:5]:
            print(f"{count:>30} rows: {each * 1e6:7.1f} us with {tiles}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles, stages and warps")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--kinds", nargs="+", default=[kind.name for kind in KINDS])
    arguments = parser.parse_args()
    require_gpu("gpu_grouped")
    chained = torch.cuda.get_device_capability() >= _CHAINING
    print(f"{torch.cuda.get_device_name()}: a copy moves {peak() / 1e9:.0f} GB/s")
    with torch.inference_mode():
        for kind in (kind for kind in KINDS if kind.name in arguments.kinds):
            plain = plain_seconds(kind)
            for form in arguments.forms:
                linears = layers(kind, FORMS[form])
                print_table(kind, form, linears, plain, chained)
                if arguments.sweep:
                    print_sweep(kind, linears)


def print_table(kind: Kind, form: str, linears: list[GroupedLinear], plain: dict[int, float], chained: bool) -> None:
    """Print the figures of a layer in one form."""
    for count in ROWS:
        rows = rows_of(kind, count)
        ways: list[Way] = [
            lambda linear, rows: few_rows(rows, linear),
            lambda linear, rows: nn.functional.linear(rows, unpacked(linear, DTYPE)),
        ]
        if count == 1:
            ways.append(lambda linear, rows: multiply(rows, linear, chained=chained))
        took = [timed(linears, way, rows) for way in ways]
        figures = " ".join(f"{each * 1e6:8.1f}" for each in (*took[:2], plain[count], *took[2:]))
        print(f"{kind.name:>8} {form:>10} {count:>5} rows {figures}", flush=True)


if __name__ == "__main__":
    main()
