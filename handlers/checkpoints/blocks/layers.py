"""Modules that compute with weights in blocks of few bits, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.blocks.formats import INPUTS, StoredWeight
from handlers.checkpoints.blocks.free_cores import only_free_cores
from handlers.checkpoints.blocks.layout import FEW_ROWS, is_for_tiles, join, lay_out
from handlers.checkpoints.grouped.layers import GroupedLinear, GroupedWeight
from handlers.cpu_kernels.arrays import as_numpy
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS, OUTPUTS, UNPACKED_ROWS


class BlockLinear(nn.Module):
    """A linear layer of stored weights that the project's kernel computes, for activations in bfloat16 or float32.

    Up to laid[EXACT_ROWS] rows weights are multiplied as they are stored; for more rows they are unpacked. On both
    sides of this border a row gets the same bits whatever other rows are in the batch.
    """

    is_padded = False
    max_rows = sys.maxsize
    """Up to how many rows the project's kernel computes: all."""
    max_exact_rows = 32
    """Up to how many rows weights can be multiplied as they are stored: unpacking is faster for more rows."""

    def __init__(
        self, laid: np.ndarray, widths: tuple[int, int], formats: Sequence[str], bias: Any, dtype: torch.dtype
    ) -> None:
        """`laid` is in the layout of the kernel, `widths` are those of input and output."""
        super().__init__()
        self.in_features, self.out_features = widths
        self.formats, self.dtype = tuple(dict.fromkeys(formats)), dtype
        self.register_buffer("bias", bias)
        self.lay(laid)
        self.added = as_numpy(torch.empty(0, dtype=dtype) if bias is None else bias)
        self._kernel = self._kernel_for(dtype)
        self._threads = torch.get_num_threads()

    @classmethod
    def from_stored(cls, stored: StoredWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> BlockLinear:
        """Return a layer for activations of type `dtype`, in which its bias is."""
        with only_free_cores():
            laid = lay_out(stored)
        return cls(laid, (stored.in_features, len(stored.raw)), [stored.format.name], bias, dtype)

    @classmethod
    def join(cls, linears: Sequence[BlockLinear], bias: torch.Tensor | None) -> BlockLinear:
        """Return layers of one input as one, whose outputs are beside each other."""
        first, outputs = linears[0], sum(linear.out_features for linear in linears)
        formats = [name for linear in linears for name in linear.formats]
        laid = join([linear.laid.reshape(-1) for linear in linears]).reshape((*first.laid.shape[:-1], -1))
        return cls(laid, (first.in_features, outputs), formats, bias, first.dtype)

    @classmethod
    def is_joinable(cls, linears: Sequence[BlockLinear]) -> bool:
        """Whether layers can be one: for one input, filling all panels but the last."""
        is_whole = all(linear.out_features % OUTPUTS == 0 for linear in linears[:-1])
        return is_whole and len({(type(linear), linear.in_features, linear.dtype) for linear in linears}) == 1

    @property
    def unmeasured_rows(self) -> int:
        """Up to how many rows weights are multiplied as they are stored, if it was not measured.

        Where products are of bfloat16, 16 rows take an AMD EPYC as long if weights are unpacked, and 32 rows less time.
        """
        from handlers.cpu_kernels import amx
        from handlers.cpu_kernels.blocks import words
        from handlers.cpu_kernels.intrinsics import host_has

        is_together = words.IS_USABLE and not amx.IS_USABLE and self.dtype == torch.bfloat16
        most = self.max_exact_rows // 2 if host_has("avx512bf16") else self.max_exact_rows
        return most if is_together else FEW_ROWS

    def limit_exact_rows(self, rows: int) -> None:
        """Say up to how many rows weights are multiplied as they are stored."""
        self.laid.reshape(-1)[EXACT_ROWS] = rows

    def limit_unpacked_rows(self, rows: int) -> None:
        """Say up to how many rows weights are unpacked: all of them, unless the layer `has_tiles`."""
        self.laid.reshape(-1)[UNPACKED_ROWS] = rows if self.has_tiles else sys.maxsize

    def _kernel_for(self, dtype: torch.dtype) -> Any:
        from handlers.cpu_kernels.blocks.linear import block_linear, block_linear_in_vectors

        return block_linear if dtype == torch.bfloat16 else block_linear_in_vectors

    def lay(self, laid: np.ndarray) -> None:
        """Take weights in the layout of the kernel, or the same ones from another place of the memory."""
        self.laid = laid
        self.has_tiles = is_for_tiles(laid.reshape(-1))
        """Whether tile registers can multiply the weights as bytes, by activations that are rounded to 8 bits."""
        # Its bytes are counted, and models bring activations to its type (Mamba, T5).
        self.register_buffer("weight", torch.from_numpy(laid).view(self.dtype), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.reshape(-1, self.in_features).contiguous()
        out = rows.new_empty((rows.shape[0], self.out_features))
        self.compute(as_numpy(rows), as_numpy(out))
        return out.view(*hidden.shape[:-1], self.out_features)

    def compute(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Do it for rows (n, in_features) as the kernel takes them, into `out`."""
        self._kernel(rows, self.laid, self.added, out, self._threads)


class AdaptedBlockLinear(nn.Module):
    """A layer of blocks for activations in another order, as act-order of gptq leaves them, or of another type."""

    def __init__(self, linear: BlockLinear, order: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`order` (in_features,) int64 has the input that comes at each place; None is the order as it is.

        `dtype` is the type of the activations.
        """
        super().__init__()
        self.linear, self.dtype = linear, dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("order", order)

    @property
    def weight(self) -> torch.Tensor:
        """The bytes of the blocks, for code that reads what a layer's weight is of."""
        return self.linear.weight.view(self.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        inputs = hidden if self.order is None else hidden.index_select(-1, self.order)
        return self.linear(inputs.to(self.linear.dtype)).to(hidden.dtype)


@dataclass(frozen=True)
class KeptLayer:
    """What a linear layer stores: a weight, a bias (out,), and the inputs (in,) int64 in the order of the blocks."""

    stored: StoredWeight
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def module(self, dtype: torch.dtype) -> nn.Module:
        """Return the layer, for activations of a type."""
        computed = torch.float32 if dtype == torch.float16 else dtype  # no kernel reads float16
        bias = None if self.bias is None else self.bias.to(computed)
        linear = BlockLinear.from_stored(self.stored, bias, computed)
        is_adapted = self.order is not None or computed != dtype
        return AdaptedBlockLinear(linear, self.order, dtype) if is_adapted else linear

    def gpu_module(self, dtype: torch.dtype) -> nn.Module:
        """Return the layer as a GPU computes it, for activations of a type. Blocks have no minima and no codebook."""
        found, zero = self.stored.numbers(), 8 if self.stored.format.block_bytes < INPUTS else 128
        numbers, scales = (found.numbers.view(torch.uint8) + zero).contiguous(), found.scales
        zeros = torch.full_like(scales, zero, dtype=torch.uint8)
        if bool((scales == scales[:, :1]).all()):
            scales, zeros = scales[:, :1], zeros[:, :1]
        return GroupedLinear(GroupedWeight(4 if zero == 8 else 8, numbers, scales, zeros, self.order), self.bias, dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the layer in a file, by their names in it."""
        parts = {"blocks": self.stored.raw, "bias": self.bias, "order": self.order}
        return {name: part.contiguous() for name, part in parts.items() if part is not None}


def reads_codebooks() -> bool:
    """Whether the kernel reads blocks with codebooks on this processor."""
    from handlers.cpu_kernels.blocks.numbers import HAS_TABLES

    return HAS_TABLES


class StoredEmbedding(nn.Module):
    """Embeddings whose rows are unpacked when they are looked up, in the type `dtype`."""

    def __init__(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored, self.dtype = stored, dtype
        self.num_embeddings, self.embedding_dim = len(stored.raw), stored.in_features
        self.register_buffer("weight", stored.raw, persistent=False)  # whose length is asked for

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) -> (..., embedding_dim)."""
        return self.stored.rows(ids.flatten()).to(self.dtype).view(*ids.shape, -1)
