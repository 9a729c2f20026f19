"""Reads the tensors of packed layers, as checkpoints have them, as numbers, zeros and scales.

A weight is scale * (number - zero), with a scale and a zero for each group of inputs and each output.

- gptq (AutoGPTQ, GPTQModel): words of 32 bits hold numbers of consecutive inputs; those of 3 bits continue in the next
  word. Format `gptq` stores zeros less one, `gptq_v2` as they are. With act-order `g_idx` has the group of each input:
  inputs are brought into the order of their groups, and so are activations.
- awq (AutoAWQ, version GEMM): words hold numbers of consecutive outputs, in the order of `_AWQ_ORDER`.
- compressed-tensors: words hold numbers of consecutive inputs, and of consecutive outputs for zeros; or integers and
  floats of 8 bits lie as they are.
- fp8 (DeepSeek, Qwen): floats of 8 bits, with scales for blocks of inputs and outputs, or for the whole layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from handlers.checkpoints.blocks.formats import INPUTS, Q4_0, Q4_ZERO, Q8_0, StoredWeight
from handlers.checkpoints.blocks.packed_layers import as_blocks
from handlers.checkpoints.blocks.rounding import halves
from handlers.checkpoints.grouped.layers import GroupedWeight
from handlers.checkpoints.quantization import GPTQ_BITS
from lmi_server.contract.texts.quoting import excerpt

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors
_SIZES = re.compile(r"[0-9]{1,9}x[0-9]{1,9}")  # how compressed-tensors once wrote them
_READ_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_SCALES = ("weight_scale", "weight_scale_inv")  # of numbers of 8 bits; both are factors


def is_known(declared: Mapping[str, Any]) -> bool:
    """Whether this module reads the layers of a checkpoint, as its config.json declares them."""
    known = _KNOWN.get(str(declared.get("quant_method")))
    return known is not None and known(declared)


def _is_known_awq(declared: Mapping[str, Any]) -> bool:
    form = declared.get("version", declared.get("format", "gemm"))
    return str(form).lower() == "gemm" and declared.get("bits", declared.get("w_bit", 4)) == 4


def _is_known_gptq(declared: Mapping[str, Any]) -> bool:
    form = declared.get("checkpoint_format", declared.get("format", "gptq"))
    return form in ("gptq", "gptq_v2") and declared.get("bits") in GPTQ_BITS


def _is_known_compressed(declared: Mapping[str, Any]) -> bool:
    sparsity = declared.get("sparsity_config") or {}
    is_dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
    return declared.get("format") in _FORMATS and is_dense and not declared.get("transform_config")


def _is_known_fp8(declared: Mapping[str, Any]) -> bool:
    return declared.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn", "float8_e4m3")


_KNOWN = {
    "awq": _is_known_awq,
    "gptq": _is_known_gptq,
    "compressed-tensors": _is_known_compressed,
    "fp8": _is_known_fp8,
}


def missing_part(parts: Mapping[str, Any]) -> str | None:
    """Return the name of a tensor that a packed layer lacks; None if it is whole or no packed layer."""
    needed = _needed(parts) or ()
    return next((part for part in needed if part not in parts), None)


def is_packed(parts: Mapping[str, Any]) -> bool:
    """Whether a layer with tensors of such names is packed."""
    return _needed(parts) is not None


def _needed(parts: Mapping[str, Any]) -> tuple[str, ...] | None:
    if "qweight" in parts:
        return "qweight", "qzeros", "scales"
    if "weight_packed" in parts:
        return "weight_packed", "weight_shape", "weight_scale"
    return ("weight",) if any(name in parts for name in _SCALES) else None


@dataclass(frozen=True)
class StoredNumbers:
    """Numbers (out, in) uint8 or E4M3; zeros uint8, none of floats, and scales, both (out, groups).

    `order` has the inputs by their groups. Without an order, inputs are in the order of their groups. `groups` (in,)
    has the group of each input as stored.
    """

    bits: int
    numbers: torch.Tensor
    zeros: torch.Tensor | None
    scales: torch.Tensor
    groups: torch.Tensor
    order: torch.Tensor | None

    def plain(self) -> torch.Tensor:
        """Return the weights (out, in) float32 as the checkpoint has them."""
        numbers = self.numbers.float()
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, self.groups]
        return numbers * self.scales.float()[:, self.groups]

    def grouped(self) -> GroupedWeight | None:
        """Return the weights as a GPU holds them, inputs in the order of their groups. None if these are uneven."""
        if not self._is_even():
            return None
        numbers = self.numbers if self.order is None else self.numbers[:, self.order]
        return GroupedWeight(self.bits, numbers, self.scales, self.zeros, self.order)

    def blocks(self) -> StoredWeight | None:
        """Return the weights as blocks, with inputs in the order of their groups. None if blocks do not hold them."""
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        if (
            self.zeros is None
            or not self._is_even()
            or inputs % (groups * INPUTS)
            or not torch.equal(self.scales.half().float(), self.scales.float())
        ):
            return None
        numbers = self.numbers if self.order is None else self.numbers[:, self.order]
        repeats = inputs // groups // INPUTS
        scales, zeros = (part.repeat_interleave(repeats, 1) for part in (self.scales.half(), self.zeros))
        by_block = numbers.unflatten(1, (-1, INPUTS))
        if self.bits == 8:
            is_symmetric = bool((self.zeros == 128).all())
            return as_blocks(Q8_0, by_block ^ 128, scales) if is_symmetric else None
        if bool((self.zeros == 8).all()):
            return as_blocks(Q4_0, halves(by_block), scales)
        return as_blocks(Q4_ZERO, halves(by_block), scales, zeros)

    def _is_even(self) -> bool:
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        return bool((self.groups.bincount(minlength=groups) * groups == inputs).all())


def read_numbers(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], declared: Mapping[str, Any]
) -> StoredNumbers:
    """Return the numbers of a packed layer of `shape` (out, in).

    Raises ValueError, or an error of torch's, if its tensors are none of such a layer.
    """
    if "qweight" in tensors:
        return _read_words(tensors, shape, declared)
    if "weight_packed" in tensors:
        return _read_compressed(tensors, shape, declared)
    return _read_bytes(tensors, shape, declared)


def _read_words(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], declared: Mapping[str, Any]
) -> StoredNumbers:
    """Read a layer of gptq or awq."""
    words, zero_words, scales = tensors["qweight"], tensors["qzeros"], _finite(tensors["scales"])
    (outputs, inputs), groups = shape, len(scales)
    if words.dtype != torch.int32 or zero_words.dtype != torch.int32:
        raise ValueError(f"their types are {words.dtype} and {zero_words.dtype}")
    if declared["quant_method"] == "awq":
        bits = 4
        numbers, zeros = _in_awq_order(_columns(words, bits)), _in_awq_order(_columns(zero_words, bits))
    else:
        bits, rest = divmod(32 * len(words), inputs)
        if rest:
            raise ValueError("their sizes do not fit")
        form = declared.get("checkpoint_format", declared.get("format", "gptq"))
        numbers, zeros = _columns(words.T, bits).T, _gptq_zeros(zero_words, bits, form)
    if numbers.shape != (inputs, outputs) or scales.shape != (groups, outputs) or zeros.shape != scales.shape:
        raise ValueError("their sizes do not fit")
    of_inputs, order = _groups(tensors.get("g_idx"), inputs, groups, scales.device)
    return StoredNumbers(bits, numbers.T.contiguous(), zeros.T.contiguous(), scales.T.contiguous(), of_inputs, order)


def _groups(
    stored: torch.Tensor | None, inputs: int, groups: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the group of each input (inputs,), and the inputs in the order of their groups if that differs."""
    of_inputs = torch.arange(inputs, device=device) // (inputs // groups) if stored is None else stored.long()
    if of_inputs.shape != (inputs,) or int(of_inputs.min()) < 0 or int(of_inputs.max()) >= groups:
        raise ValueError("g_idx names other groups")
    return of_inputs, None if bool((of_inputs.diff() >= 0).all()) else torch.argsort(of_inputs, stable=True)


def _read_compressed(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], declared: Mapping[str, Any]
) -> StoredNumbers:
    """Read a layer of compressed-tensors with words of numbers."""
    words, zero_words = tensors["weight_packed"], tensors.get("weight_zero_point")
    outputs, inputs = shape
    if words.dtype != torch.int32:
        raise ValueError(f"the type of weight_packed is {words.dtype}")
    if tuple(tensors["weight_shape"].tolist()) != shape:
        raise ValueError("weight_shape is of another layer")
    bits = next((bits for bits in (4, 8) if words.shape == (outputs, -(-inputs * bits // 32))), None)
    if bits is None:
        raise ValueError("their sizes do not fit")
    scales, of_groups = _spread(_finite(tensors["weight_scale"]), shape, declared)
    numbers = _columns(words, bits)[:, :inputs]
    if zero_words is None:
        zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
    elif zero_words.dtype != torch.int32 or zero_words.shape != (-(-outputs * bits // 32), scales.shape[1]):
        raise ValueError(f"the zeros {tuple(zero_words.shape)} of {zero_words.dtype} are none of the scales")
    else:
        zeros = _columns(zero_words.T, bits)[:, :outputs].T
    of_inputs, order = _groups(tensors.get("weight_g_idx", of_groups), inputs, scales.shape[1], scales.device)
    return StoredNumbers(bits, numbers, zeros.contiguous(), scales, of_inputs, order)


def _read_bytes(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], declared: Mapping[str, Any]
) -> StoredNumbers:
    """Read a layer whose weight is of integers or floats of 8 bits."""
    numbers, zeros = tensors["weight"], tensors.get("weight_zero_point")
    stored_scales = _finite(next(tensors[name] for name in _SCALES if name in tensors))
    if numbers.shape != shape or numbers.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"the weight is {tuple(numbers.shape)} of {numbers.dtype}")
    scales, of_inputs = _spread(stored_scales, shape, declared)
    if numbers.dtype == torch.float8_e4m3fn:
        return StoredNumbers(8, numbers, None, scales, of_inputs, None)
    number_zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    if zeros is not None and bool(zeros.any()):
        if zeros.shape != stored_scales.shape or zeros.dtype != torch.int8:
            raise ValueError(f"the zeros {tuple(zeros.shape)} of {zeros.dtype} are none of the scales")
        number_zeros = (_spread(zeros.short(), shape, declared)[0] + 128).to(torch.uint8)
    return StoredNumbers(8, numbers.view(torch.uint8) ^ 128, number_zeros, scales, of_inputs, None)


def _finite(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in a type that kernels read. Raises ValueError if some are no numbers."""
    if not scales.is_floating_point():
        raise ValueError(f"the scales are of {scales.dtype}")
    read = scales if scales.dtype in _READ_TYPES else scales.float()
    if not bool(read.isfinite().all()):
        raise ValueError("some scales are infinite or NaN")
    return read


def _spread(
    scales: torch.Tensor, shape: tuple[int, int], declared: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of blocks, outputs or a layer as those of each output, (out, groups), and the inputs' groups."""
    outputs, inputs = shape
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if scales.shape in ((1, 1), (outputs, 1)):
        return scales.expand(outputs, 1).contiguous(), torch.zeros(inputs, dtype=torch.long, device=scales.device)
    # The sizes are as hostile as the file: a larger block than the layer is the layer.
    height, width = (min(size, limit) for size, limit in zip(_block_size(declared), shape, strict=True))
    if scales.shape == (-(-outputs // height), -(-inputs // width)):
        by_output = scales.repeat_interleave(height, 0)[:outputs].contiguous()
        return by_output, torch.arange(inputs, device=scales.device) // width
    of_groups = inputs // scales.shape[1]
    if scales.shape != (outputs, scales.shape[1]) or inputs % scales.shape[1]:
        raise ValueError("their sizes do not fit")
    return scales, torch.arange(inputs, device=scales.device) // of_groups


def _block_size(declared: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many outputs and inputs a block of scales has, as a checkpoint declares it."""
    found = declared.get("weight_block_size")
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found = weights.get("block_structure") if found is None and isinstance(weights, Mapping) else found
    if found is None:
        return 128, 128
    if isinstance(found, str) and _SIZES.fullmatch(found):
        found = [int(size) for size in found.split("x")]
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(size, int) and size > 0 for size in found):
        raise ValueError(f"config.json declares blocks of {excerpt(str(found))}, which are not two sizes above 0")
    return found[0], found[1]


def _gptq_zeros(words: torch.Tensor, bits: int, form: str) -> torch.Tensor:
    """Words (groups, n) int32 -> zeros (groups, outputs) uint8.

    GPTQModel subtracts one from whole words of 2, 4 or 8 bits, where a zero of 0 borrows from the next one, and from
    each number of 3 bits. So one is added in the same way.
    """
    if form == "gptq" and 32 % bits == 0:
        words = words + sum(1 << shift for shift in range(0, 32, bits))
    zeros = _columns(words, bits)
    return (zeros + 1) % (1 << bits) if form == "gptq" and 32 % bits else zeros


def _columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words (rows, n) int32 of numbers, the lowest bits first -> (rows, n * 32 / bits) uint8."""
    if bits not in GPTQ_BITS:
        raise ValueError(f"{bits} bits")
    together = bits // math.gcd(bits, 32)  # words, after which a number begins with a word again
    parts = words.unflatten(1, (-1, together))
    columns = []
    for start in range(0, 32 * together, bits):
        place, shift = divmod(start, 32)
        number = parts[:, :, place] >> shift
        if shift + bits > 32:  # its higher bits are in the next word
            number = number & (1 << 32 - shift) - 1 | parts[:, :, place + 1] << 32 - shift
        columns.append((number & (1 << bits) - 1).to(torch.uint8))
    return torch.stack(columns, 2).flatten(1)


def _in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unflatten(1, (-1, len(_AWQ_ORDER)))[:, :, list(_AWQ_ORDER)].flatten(1)
