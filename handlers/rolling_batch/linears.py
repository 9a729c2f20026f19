"""Linear layers of bfloat16 whose weights are laid out for the CPU once, when the model loads.

Decoding a few rows is bound by reading weights, so the layout has to let every core read its part in order, with no
conversion on the way. oneDNN has such layouts, but torch converts a plain weight to them in every call, and looks up
compiled code by the shapes of the operands, which for few rows takes as long as the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.rolling_batch.attention import as_numpy

_DECODE_ROWS = 32  # the number of rows that oneDNN lays weights out for; it computes others with the same layout


def is_plain(module: Any) -> bool:
    """Whether a module multiplies by its weight and adds its bias, and does nothing else.

    A subclass may compute anything. compressed-tensors and accelerate set a `forward` of theirs on the instance, and
    hooks may change the result.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return not (module._forward_pre_hooks or module._forward_hooks) and module.weight.is_floating_point()


def lay_out_linears(model: nn.Module) -> int:
    """Replace the plain bfloat16 linear layers of `model` by the kind that is fastest on this CPU; return how many."""
    packs = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not is_plain(child):
                continue
            if _suits_tiles(child, packs):
                setattr(module, name, TiledLinear(child))
            elif packs:
                setattr(module, name, PackedLinear(child))
            else:
                continue
            count += 1
    return count


def _suits_tiles(linear: nn.Linear, packs: bool) -> bool:
    """Return whether the project's kernel is the fastest one for a layer; `packs` says whether oneDNN has one.

    Without AVX-512 it has none, and torch converts the weight to float32 in every call.
    """
    from handlers.rolling_batch.cpu_kernels.intrinsics import TILES_ARE_FASTEST

    fastest = TILES_ARE_FASTEST or not packs
    return fastest and linear.weight.dtype == torch.bfloat16 and linear.in_features % 2 == 0


class TiledLinear(nn.Module):
    """A linear layer of bfloat16 that the project's own kernel computes, with its weight in that kernel's layout.

    With many rows it is as fast as oneDNN, with few twice as fast, because no code is looked up. A row gets the same
    bits whatever other rows are in the batch, which oneDNN does not promise.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from handlers.rolling_batch.cpu_kernels.linear import linear as kernel

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.laid = _laid_weight(linear.weight.detach())
        self.added = as_numpy(torch.empty(0, dtype=torch.bfloat16) if linear.bias is None else linear.bias.detach())
        self._kernel = kernel
        self._threads = torch.get_num_threads()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.reshape(-1, self.in_features).contiguous()
        out = rows.new_empty((rows.shape[0], self.out_features))
        self._kernel(as_numpy(rows), self.laid, self.added, as_numpy(out), self._threads)
        return out.view(*hidden.shape[:-1], self.out_features)


def _laid_weight(weight: torch.Tensor) -> np.ndarray:
    """(out_features, in_features) bfloat16 -> (panels, in_features / 2, TILE_COLUMNS) uint32.

    A panel has the weights of TILE_COLUMNS outputs. Each of its words has those of two neighbouring inputs, as the
    bfloat16 instruction of AVX-512 takes them. Zeros fill up the last panel.
    """
    from handlers.rolling_batch.cpu_kernels.intrinsics import TILE_COLUMNS

    panels = -(-weight.shape[0] // TILE_COLUMNS)
    padded = nn.functional.pad(weight, (0, 0, 0, panels * TILE_COLUMNS - weight.shape[0]))
    words = padded.contiguous().view(torch.int32).unflatten(0, (panels, TILE_COLUMNS))
    laid: np.ndarray = words.transpose(1, 2).contiguous().numpy().view(np.uint32)
    return laid


class PackedLinear(nn.Module):
    """A linear layer whose bfloat16 weight is laid out for oneDNN once instead of in every call.

    The operators are those that the freezing pass of torch.compile emits for a constant weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _DECODE_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self._linear(hidden, self._weight, self._bias, "none", [], "")
