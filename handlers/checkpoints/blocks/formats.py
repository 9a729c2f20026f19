"""The formats of blocks: a weight is `scale * number - minimum`, with a scale and a minimum for each block.

The bytes of FORMATS are ggml's block_q8_0, block_q4_0 and so on (ggml-common.h of llama.cpp), as in GGUF files: rows
of a weight one after the other, and blocks of 32 inputs along each row. What other libraries pack has blocks that ggml
does not have: Q4_ZERO, and those of `codebook_format`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

INPUTS = 32
"""Of a block: the inputs that share a scale."""


@dataclass(frozen=True)
class Numbers:
    """The weights of a linear layer: numbers (out, in) int8; scales and minima (out, n) float16, or no minima.

    K-quants have factors (out, in / 256) float16: then scales and minima are bytes that are multiplied by these. There
    are as many scales as blocks, or two for each block. zeros (out, n) uint8 stand in place of minima: the numbers that
    mean zero. With a codebook (16,) float32 numbers are places in it, and scales are float32.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    minimum_factors: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """Return the weights, (out, in) float32."""
        scales = _multiply(self.scales, self.factors)
        numbers = self.numbers.float() if self.codebook is None else self.codebook[self.numbers.long()]
        blocks = numbers.unflatten(1, (scales.shape[1], -1))
        if self.zeros is not None:
            blocks -= self.zeros[:, :, None]
        weights = blocks.mul_(scales[:, :, None])
        if self.minima is not None:
            weights -= _multiply(self.minima, self.minimum_factors)[:, :, None]
        return weights.flatten(1)


def _multiply(scales: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    if factors is None:
        return scales.float()
    return (factors.float()[:, :, None] * scales.float().unflatten(1, (factors.shape[1], -1))).flatten(1)


@dataclass(frozen=True)
class Format:
    """A format by ggml's name; `block_bytes` hold `block_inputs` weights.

    `read` takes raw bytes, (out, blocks, block_bytes) uint8. `scales`: where its float16 are in a block.
    """

    name: str
    block_bytes: int
    scales: tuple[int, ...]
    read: Callable[[torch.Tensor], Numbers]
    block_inputs: int = INPUTS


def _half(raw: torch.Tensor, first: int) -> torch.Tensor:
    # A copy in any case: of one block the slice counts as contiguous, and its stride of an odd length has no float16.
    halves = raw[:, :, first : first + 2].clone(memory_format=torch.contiguous_format)
    return halves.view(torch.float16)[:, :, 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Byte i of a block has weight i in its lower half, and weight i + 16 above."""
    return torch.cat((packed & 15, packed >> 4), dim=2).view(torch.int8)


def _read_q8_0(raw: torch.Tensor) -> Numbers:
    return Numbers(raw[:, :, 2:].contiguous().view(torch.int8).flatten(1), _half(raw, 0))


def _read_q4_0(raw: torch.Tensor) -> Numbers:
    return Numbers((_nibbles(raw[:, :, 2:]) - 8).flatten(1), _half(raw, 0))


def _read_q4_1(raw: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(raw[:, :, 4:]).flatten(1), _half(raw, 0), -_half(raw, 2))


def _super_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight scales and eight minima of 6 bits each, (out, n) uint8, that 12 bytes of a super-block hold.

    The first four of each are the lower bits of bytes 0 to 3 and 4 to 7, whose upper two bits are those of the others.
    """
    first, second, third = packed.split(4, dim=2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    return scales.flatten(1), minima.flatten(1)


def _low_and_high(raw: torch.Tensor) -> torch.Tensor:
    """(out, n, 128) -> (out, n, 256): 32 bytes have 32 weights in their lower halves, and the next 32 above."""
    of_bytes = raw.unflatten(2, (4, 32))
    return torch.stack((of_bytes & 15, of_bytes >> 4), dim=3).flatten(2)


def _read_q4_k(raw: torch.Tensor) -> Numbers:
    scales, minima = _super_scales(raw[:, :, 4:16])
    numbers = _low_and_high(raw[:, :, 16:]).view(torch.int8).flatten(1)
    return Numbers(numbers, scales, minima, _half(raw, 0), _half(raw, 2))


def _read_q5_k(raw: torch.Tensor) -> Numbers:
    scales, minima = _super_scales(raw[:, :, 4:16])
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (raw[:, :, None, 16:48] >> shifts & 1).flatten(2)  # bit b of a byte belongs to block b
    numbers = (_low_and_high(raw[:, :, 48:]) | high << 4).view(torch.int8).flatten(1)
    return Numbers(numbers, scales, minima, _half(raw, 0), _half(raw, 2))


def _read_q6_k(raw: torch.Tensor) -> Numbers:
    """Each half of a super-block has 64 bytes, whose lower halves come first, and 32 bytes of upper bits."""
    low = raw[:, :, :128].unflatten(2, (2, 1, 64)) >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = raw[:, :, 128:192].unflatten(2, (2, 1, 32)) >> shifts & 3
    numbers = (low.flatten(2) | high.flatten(2) << 4).view(torch.int8) - 32
    return Numbers(numbers.flatten(1), raw[:, :, 192:208].view(torch.int8).flatten(1), None, _half(raw, 208))


def _read_q4_zero(raw: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(raw[:, :, 3:]).flatten(1), _half(raw, 0), zeros=raw[:, :, 2])


def codebook_format(codebook: torch.Tensor) -> Format:
    """Return the format of blocks whose scale is a float32, and whose numbers are places in a codebook (16,)."""

    def read(raw: torch.Tensor) -> Numbers:
        scales = raw[:, :, :4].contiguous().view(torch.float32)[:, :, 0]
        return Numbers(_nibbles(raw[:, :, 4:]).flatten(1), scales, codebook=codebook)

    return Format("q4_code", 20, (), read)


Q8_0 = Format("q8_0", 34, (0,), _read_q8_0)
Q4_0 = Format("q4_0", 18, (0,), _read_q4_0)
Q4_1 = Format("q4_1", 20, (0, 2), _read_q4_1)
Q4_K = Format("q4_k", 144, (0, 2), _read_q4_k, 256)
Q5_K = Format("q5_k", 176, (0, 2), _read_q5_k, 256)
Q6_K = Format("q6_k", 210, (208,), _read_q6_k, 256)
Q4_ZERO = Format("q4_zero", 19, (0,), _read_q4_zero)
FORMATS = {each.name: each for each in (Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K)}


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored: `raw` (out, bytes of a row) uint8."""

    format: Format
    raw: torch.Tensor

    @property
    def in_features(self) -> int:
        return int(self.raw.shape[1]) // self.format.block_bytes * self.format.block_inputs

    def numbers(self) -> Numbers:
        return self.format.read(self.raw.unflatten(1, (-1, self.format.block_bytes)))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows (n,) of the weight, (n, in) float32."""
        return StoredWeight(self.format, self.raw[ids]).numbers().weight()
