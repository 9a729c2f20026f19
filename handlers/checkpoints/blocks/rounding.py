"""Quantises weights to blocks: what ggml calls q8_0, q4_0, q4_1 and q4_k, and int8 with one scale for each output.

The first three have the bits that ggml gives them. Of q4_k ggml searches the scales, here they follow from the least
and the greatest weight of each block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from handlers.checkpoints.blocks.formats import FORMATS, INPUTS, Q8_0, StoredWeight

_Blocks = tuple[torch.Tensor, ...]


def quantize(weight: torch.Tensor, name: str) -> StoredWeight:
    """Quantise a weight (out, in) to a value of option.quantize, or to "q4_1".

    The width is a multiple of INPUTS, and of 256 for "q4_k".
    """
    blocks = weight.detach().float().unflatten(1, (-1, INPUTS))
    if name == "q4_k":
        return StoredWeight(FORMATS[name], _to_q4_k(blocks).flatten(1))
    *scales, numbers = _QUANTIZERS[name](blocks)
    raw = torch.cat((*(part.half().view(torch.uint8) for part in scales), numbers), dim=2)
    return StoredWeight(FORMATS.get(name, Q8_0), raw.flatten(1))


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def _to_8_bits(blocks: torch.Tensor) -> _Blocks:
    scales = blocks.abs().amax(2, keepdim=True) / 127
    return scales, torch.round(blocks * _inverse(scales)).to(torch.int8).view(torch.uint8)


def _to_int8(blocks: torch.Tensor) -> _Blocks:
    """All blocks of an output have its scale."""
    scales = (blocks.abs().amax((1, 2), keepdim=True) / 127).half().float()
    numbers = torch.round(blocks * _inverse(scales)).clamp_(-127, 127).to(torch.int8)
    return scales.expand(-1, blocks.shape[1], 1), numbers.view(torch.uint8)


def _to_4_bits(blocks: torch.Tensor) -> _Blocks:
    """The weight of greatest magnitude becomes -8: there are 16 numbers, and one more of them is negative."""
    greatest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = greatest / -8
    return scales, halves((blocks * _inverse(scales) + 8.5).clamp_(0, 15).to(torch.uint8))


def _to_4_bits_with_minima(blocks: torch.Tensor) -> _Blocks:
    least = blocks.amin(2, keepdim=True)
    scales = (blocks.amax(2, keepdim=True) - least) / 15
    return scales, least, halves(((blocks - least) * _inverse(scales) + 0.5).clamp_(0, 15).to(torch.uint8))


_QUANTIZERS: dict[str, Callable[[torch.Tensor], _Blocks]] = {
    "q8_0": _to_8_bits,
    "q4_0": _to_4_bits,
    "q4_1": _to_4_bits_with_minima,
    "int8": _to_int8,
}


def _to_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Return the bytes of super-blocks of eight blocks, whose scales and minima have 6 bits (see `_super_scales`)."""
    supers = blocks.unflatten(1, (-1, 8))
    minima = -supers.amin(3).clamp_(max=0)
    (factors, scales), (of_minima, minima) = map(_to_6_bits, ((supers.amax(3) + minima) / 15, minima))
    less, scale = (factor.float() * six for factor, six in ((of_minima, minima), (factors, scales)))
    numbers = torch.round((supers + less[..., None]) * _inverse(scale)[..., None]).clamp_(0, 15).to(torch.uint8)
    pairs = numbers.unflatten(2, (4, 2))
    scales, minima = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = [
        scales[..., :4] | scales[..., 4:] >> 4 << 6,
        minima[..., :4] | minima[..., 4:] >> 4 << 6,
        scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4,
        (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).flatten(2),
    ]
    return torch.cat((factors.view(torch.uint8), of_minima.view(torch.uint8), *packed), dim=2)


def _to_6_bits(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (out, supers, 8) of 0 and more -> a float16 for each super-block, and the numbers up to 63 it scales."""
    factors = (scales.amax(2, keepdim=True) / 63).half()
    return factors, torch.round(scales * _inverse(factors.float())).clamp_(0, 63)


def halves(numbers: torch.Tensor) -> torch.Tensor:
    """Byte i has number i of a block in its lower half, and number i + 16 above."""
    low, high = numbers.split(INPUTS // 2, dim=2)
    return low | high << 4
