"""Linear layers on a GPU that hold their weights as numbers of 4 or 8 bits, with a scale for each group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

MIN_CHUNK = 32
_MAX_CHUNK = 128
# Up to so many rows a kernel unpacks numbers on their way to the product; for more, the weight is unpacked before. On
# an H200 28,672 outputs of 4,096 inputs in 4 bits take 92 and 160 us for 128 rows, 174 and 179 us for 256.
FEW_ROWS = 128


def has_gpu_kernels() -> bool:
    """Whether the kernels run on the GPUs of this worker, if it has some: NVIDIA's, where Triton is installed."""
    return torch.version.hip is None and find_spec("triton") is not None


@dataclass(frozen=True)
class GroupedWeight:
    """A weight `scale * (number - zero)`, in one of two forms.

    Integers: numbers (out, in) uint8 of `bits` bits, zeros (out, groups) uint8. Floats: numbers (out, in) E4M3, no
    zeros. scales (out, groups) are floats; a group has in / groups inputs. With an `order` (in,) int64 numbers are of
    the inputs in that order.
    """

    bits: int
    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Return how many inputs have one scale."""
        return int(self.numbers.shape[1]) // int(self.scales.shape[1])

    def is_grouped(self) -> bool:
        """Return whether the kernels have tiles for such groups."""
        return self.numbers.shape[1] % self.scales.shape[1] == 0 and self.group % MIN_CHUNK == 0

    def plain(self) -> torch.Tensor:
        """Return the weight (out, in) float32, its inputs in the order of the numbers."""
        numbers = self.numbers.float().unflatten(1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, :, None]
        return (numbers * self.scales.float()[:, :, None]).flatten(1)


class GroupedLinear(nn.Module):
    """A linear layer of such a weight.

    `weight` is (out, in * bits / 8) uint8. In numbers of 4 bits, byte i of a chunk of inputs has number i in its lower
    half, and above it number i of the second half of the chunk. `bias` (out,) is of type `dtype`, or None.
    """

    def __init__(self, held: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = held.numbers.shape
        self.dtype, self.group, self.is_float = dtype, held.group, held.zeros is None
        self.chunk = min(held.group & -held.group, _MAX_CHUNK)
        self.bits = 4 if held.bits <= 4 else 8
        self.zero = 1 << (self.bits - 1)
        is_usual = held.zeros is None or bool((held.zeros == self.zero).all())
        self.register_buffer("weight", self._packed(held.numbers.contiguous()))
        self.register_buffer("scales", held.scales.contiguous())
        self.register_buffer("zeros", None if is_usual or held.zeros is None else held.zeros.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))
        self.register_buffer("order", held.order)

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return numbers.view(torch.uint8)
        low, high = numbers.unflatten(1, (-1, self.chunk)).chunk(2, dim=2)
        return (low | high << 4).flatten(1)

    def held(self) -> GroupedWeight:
        """Return the weight as it was given."""
        if self.is_float:
            return GroupedWeight(8, self.weight.view(torch.float8_e4m3fn), self.scales, None, self.order)
        numbers = self.weight
        if self.bits == 4:
            of_chunks = self.weight.unflatten(1, (-1, self.chunk // 2))
            numbers = torch.cat((of_chunks & 15, of_chunks >> 4), dim=2).flatten(1)
        zeros = torch.full_like(self.scales, self.zero, dtype=torch.uint8) if self.zeros is None else self.zeros
        return GroupedWeight(self.bits, numbers, self.scales, zeros, self.order)

    @classmethod
    def join(cls, linears: Sequence[GroupedLinear], bias: torch.Tensor | None) -> GroupedLinear:
        """Return layers of one input as one, whose outputs are beside each other."""
        held = [linear.held() for linear in linears]
        zeros = None if linears[0].is_float else torch.cat([each.zeros for each in held if each.zeros is not None])
        numbers, scales = (torch.cat([getattr(each, name) for each in held]) for name in ("numbers", "scales"))
        return cls(GroupedWeight(held[0].bits, numbers, scales, zeros, held[0].order), bias, linears[0].dtype)

    @classmethod
    def is_joinable(cls, linears: Sequence[GroupedLinear]) -> bool:
        """Whether layers can be one: numbers and groups of one kind, and inputs in one order."""
        kinds = {(each.in_features, each.group, each.bits, each.is_float, each.scales.dtype) for each in linears}
        orders = [each.order for each in linears]
        first = orders[0]
        if first is None:
            return len(kinds) == 1 and all(order is None for order in orders)
        return len(kinds) == 1 and all(order is not None and torch.equal(order, first) for order in orders)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        inputs = hidden if self.order is None else hidden.index_select(-1, self.order)
        rows = inputs.reshape(-1, self.in_features)
        if len(rows) <= FEW_ROWS and rows.is_cuda:
            from handlers.checkpoints.grouped.launch import few_rows

            out = few_rows(rows.contiguous(), self)
        else:
            out = nn.functional.linear(rows, self.unpacked(rows.dtype), self.bias)
        return out.view(*hidden.shape[:-1], self.out_features)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight (out, in) in a type, its inputs in the order of the numbers."""
        weight: torch.Tensor = self.weight
        if not weight.is_cuda:
            return self.held().plain().to(dtype)
        from handlers.checkpoints.grouped.launch import unpacked

        return unpacked(self, dtype)
