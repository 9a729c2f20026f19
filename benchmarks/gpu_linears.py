"""The linear layers of a decoder layer for one row on a GPU: the project's kernel, and torch's operators.

    python -m benchmarks.gpu_linears           # the shape of Llama 3 8B, in bfloat16, under 30 s
    python -m benchmarks.gpu_linears --sweep   # the kernel with other tiles and warps

Launches are recorded in a CUDA graph and replayed. Each is of weights of its own, as in a model, so that the one before
leaves none in the cache of the GPU. The bytes are those of the weights; the peak is that of a copy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_attention import peak, require_gpu, seconds
from handlers.checkpoints.fp8.layers import Fp8Linear
from handlers.rolling_batch.fused.gpu_rows import GpuRowKernels
from handlers.rolling_batch.fused.one_row import Tiles, multiply

DTYPE = torch.bfloat16
_BYTES = 2**31  # of weights of one measurement at least, many times the cache of a GPU


@dataclass(frozen=True)
class Kind:
    """A linear layer (outputs, inputs) and what belongs to it."""

    name: str
    outputs: int
    inputs: int
    normed: bool = False
    gated: bool = False
    added: bool = False


KINDS = (
    Kind("qkv", 6144, 4096, normed=True),
    Kind("o", 4096, 4096, added=True),
    Kind("gate_up", 28672, 4096, normed=True, gated=True),
    Kind("down", 4096, 14336, added=True),
)


class Measured:
    """Layers of a kind, and rows for them."""

    def __init__(self, kind: Kind, fp8: bool) -> None:
        self.kind = kind
        copies = max(2, _BYTES // (kind.outputs * kind.inputs * DTYPE.itemsize))
        with torch.device("cuda"):
            plain = (nn.Linear(kind.inputs, kind.outputs, bias=False, dtype=DTYPE) for _ in range(copies))
            self.linears: list[Any] = [Fp8Linear.quantize(linear) if fp8 else linear for linear in plain]
            self.row = torch.randn(1, kind.inputs, dtype=DTYPE)
            self.residual = torch.randn(1, kind.outputs, dtype=DTYPE) if kind.added else None
            self.norm = SimpleNamespace(weight=torch.rand(kind.inputs, dtype=DTYPE), epsilon=1e-5)

    def ours(self, linear: Any, chained: bool, tiles: Tiles | None = None) -> torch.Tensor:
        norm = self.norm if self.kind.normed else None
        return multiply(self.row, linear, norm, self.kind.gated, self.residual, chained, tiles)

    def theirs(self, linear: Any) -> torch.Tensor:
        kernels, row = GpuRowKernels(), self.row
        if self.kind.normed:
            row = kernels.rms_norm(row, self.norm.weight, self.norm.epsilon)
        out = linear(row)
        if self.kind.gated:
            return kernels.silu_and_mul(out)
        return out if self.residual is None else self.residual + out

    def our_seconds(self, chained: bool = True, tiles: Tiles | None = None) -> float:
        return seconds([lambda linear=linear: self.ours(linear, chained, tiles) for linear in self.linears])

    def their_seconds(self) -> float:
        return seconds([lambda linear=linear: self.theirs(linear) for linear in self.linears])


def sweep() -> Iterator[Tiles]:
    """Yield other tiles."""
    for outputs, step, warps in ((4, 512, 4), (2, 1024, 4), (4, 1024, 2), (4, 2048, 4), (2, 2048, 4), (8, 1024, 8)):
        yield Tiles(outputs, step, warps)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles and warps")
    arguments = parser.parse_args()
    require_gpu("gpu_linears")
    most = peak()
    print(f"{torch.cuda.get_device_name()}: a copy moves {most / 1e9:.0f} GB/s")
    print(f"{'layer':>8} {'weights':>8} {'us':>7} {'of copy':>8} {'unchained':>10} {'torch us':>9} {'differs':>8}")
    with torch.inference_mode():
        for kind, fp8 in itertools.product(KINDS, (False, True)):
            measured = Measured(kind, fp8)
            first = measured.linears[0]
            expected = measured.theirs(first).float()
            error = float((measured.ours(first, False).float() - expected).norm() / expected.norm())
            took, unchained = (measured.our_seconds(chained) for chained in (True, False))
            theirs = measured.their_seconds()
            share = first.weight.nbytes / took / most
            figures = f"{took * 1e6:>7.1f} {share:>8.0%} {unchained * 1e6:>10.1f} {theirs * 1e6:>9.1f} {error:>8.4f}"
            print(f"{kind.name:>8} {'fp8' if fp8 else 'bf16':>8} {figures}", flush=True)
            for tiles in sweep() if arguments.sweep else ():
                took = measured.our_seconds(tiles=tiles)
                print(f"{took * 1e6:>25.1f} us with {tiles}", flush=True)


if __name__ == "__main__":
    main()
