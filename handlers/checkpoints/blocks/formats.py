"""The formats of blocks: a weight is `scale * number - minimum`, with a scale and a minimum for each block.

The bytes are those of ggml's block_q8_0, block_q4_0 and so on (ggml-common.h of llama.cpp), which GGUF files hold: rows
of a weight one after the other, and blocks of 32 inputs along each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

INPUTS = 32
"""Of a block: the inputs that share a scale."""


@dataclass(frozen=True)
class Numbers:
    """The weights of a linear layer: numbers (out, in) int8; scales and minima (out, blocks) float16, or no minima."""

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """Return the weights, (out, in) float32."""
        blocks = self.numbers.unflatten(1, (-1, INPUTS)).float()
        weights = blocks.mul_(self.scales.float()[:, :, None])
        if self.minima is not None:
            weights -= self.minima.float()[:, :, None]
        return weights.flatten(1)


@dataclass(frozen=True)
class Format:
    """A format by ggml's name; `block_bytes` hold INPUTS weights. `zero`: the stored number that stands for zero."""

    name: str
    bits: int
    block_bytes: int
    zero: int
    read: Callable[[torch.Tensor], Numbers]


def _half(raw: torch.Tensor, first: int) -> torch.Tensor:
    return raw[:, :, first : first + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Byte i of a block has weight i in its lower half, and weight i + 16 above."""
    return torch.cat((packed & 15, packed >> 4), dim=2).view(torch.int8)


def _read_q8_0(raw: torch.Tensor) -> Numbers:
    return Numbers(raw[:, :, 2:].contiguous().view(torch.int8).flatten(1), _half(raw, 0))


def _read_q4_0(raw: torch.Tensor) -> Numbers:
    return Numbers((_nibbles(raw[:, :, 2:]) - 8).flatten(1), _half(raw, 0))


def _read_q4_1(raw: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(raw[:, :, 4:]).flatten(1), _half(raw, 0), -_half(raw, 2))


Q8_0 = Format("q8_0", 8, 34, 0, _read_q8_0)
Q4_0 = Format("q4_0", 4, 18, 8, _read_q4_0)
Q4_1 = Format("q4_1", 4, 20, 0, _read_q4_1)
FORMATS = {each.name: each for each in (Q8_0, Q4_0, Q4_1)}


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it is stored: `raw` (out, bytes of a row) uint8."""

    format: Format
    raw: torch.Tensor

    @property
    def in_features(self) -> int:
        return int(self.raw.shape[1]) // self.format.block_bytes * INPUTS

    def numbers(self) -> Numbers:
        return self.format.read(self.raw.unflatten(1, (-1, self.format.block_bytes)))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows (n,) of the weight, (n, in) float32."""
        return StoredWeight(self.format, self.raw[ids]).numbers().weight()


def quantize(weight: torch.Tensor, name: str) -> StoredWeight:
    """Quantise a weight (out, in), whose width is a multiple of INPUTS, to "q8_0" or "q4_0", as ggml does."""
    blocks = weight.detach().float().unflatten(1, (-1, INPUTS))
    numbers, scales = (_to_8_bits if name == "q8_0" else _to_4_bits)(blocks)
    raw = torch.cat((scales.half().view(torch.uint8), numbers), dim=2)
    return StoredWeight(FORMATS[name], raw.flatten(1))


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def _to_8_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = blocks.abs().amax(2, keepdim=True) / 127
    return torch.round(blocks * _inverse(scales)).to(torch.int8).view(torch.uint8), scales


def _to_4_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of greatest magnitude becomes -8: there are 16 numbers, and one more of them is negative."""
    greatest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = greatest / -8
    numbers = (blocks * _inverse(scales) + 8.5).clamp_(0, 15).to(torch.uint8)
    low, high = numbers.split(INPUTS // 2, dim=2)
    return low | high << 4, scales
