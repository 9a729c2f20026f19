"""Replaces modules of a transformers model by faster ones, on the CPU and on a GPU.

A module is recognised by its structure (the names and types of its children), not by its class: most families copy
Llama's layers into classes of their own, and new families appear with every release of transformers. Structure alone
does not prove that a module computes the same: each replacement that does more than join weights is compared with the
original on random input. A variant that only looks alike (Gemma's norm adds one to its weight) keeps its own code,
without a list of exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.blocks.int8_activations import unrounded_activations
from handlers.checkpoints.blocks.layers import AdaptedBlockLinear, BlockLinear
from handlers.checkpoints.fp8.layers import Fp8Linear
from handlers.checkpoints.grouped.layers import GroupedLinear
from handlers.cpu_kernels.arrays import as_numpy
from handlers.ranks.sharding import RowParallelLinear, plain_linear
from handlers.rolling_batch.fused.row_kernels import row_kernels

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_JOINABLE: tuple[Any, ...] = (BlockLinear, Fp8Linear, GroupedLinear)  # layers of weights in few bits


def fuse(model: nn.Module) -> dict[str, int]:
    """Replace modules of `model`, on one device that has row kernels; return how many of each kind."""
    counts = {"norms": 0, "attentions": 0, "mlps": 0}
    for module in list(model.modules()):
        counts["attentions"] += _fuse_projections(module)
        for name, child in list(module.named_children()):
            counts["norms"] += _replace(module, name, child, _is_rms_norm, FusedRMSNorm)
            counts["mlps"] += _replace(module, name, child, _is_gated_mlp, FusedGatedMLP)
    return counts


def is_plain(module: Any) -> bool:
    """Whether a module multiplies by its weight and adds its bias, and does nothing else.

    A subclass may compute anything. compressed-tensors and accelerate set a `forward` of theirs on the instance, and
    hooks may change the result.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return not (module._forward_pre_hooks or module._forward_hooks) and module.weight.is_floating_point()


def _replace(
    parent: nn.Module,
    name: str,
    child: nn.Module,
    matches: Callable[[nn.Module], bool],
    build: Callable[[Any], nn.Module],
) -> int:
    if not matches(child):
        return 0
    fused = build(child)
    if not _same_result(child, fused):
        return 0
    setattr(parent, name, fused)
    return 1


def _same_result(original: Any, fused: nn.Module) -> bool:
    like = next(original.parameters(), None)
    if like is None:
        like = torch.empty(0, dtype=original.gate_proj.dtype, device=original.gate_proj.weight.device)
    width = original.gate_proj.in_features if isinstance(fused, FusedGatedMLP) else original.weight.shape[-1]
    rows = torch.randn((1, 5, width), generator=torch.Generator().manual_seed(0)).to(like)
    # On several ranks an MLP ends in an all-reduce. All ranks compare at the same time, with the same rows, and get the
    # same bits, so that they also decide alike.
    with torch.inference_mode(), unrounded_activations(original, fused):
        return close(original(rows), fused(rows))


def close(expected: torch.Tensor, computed: torch.Tensor) -> bool:
    """Whether two results differ by rounding alone: bfloat16 rounds by up to 0.4 %, several times in a layer."""
    error = float((expected.float() - computed.float()).norm() / expected.float().norm())
    return error < (1e-4 if expected.dtype == torch.float32 else 0.015)


def _is_rms_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return type(module).__name__.endswith("RMSNorm") and list(parameters) == ["weight"] and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class FusedRMSNorm(nn.Module):
    """Llama's RMS norm in one pass over memory."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.epsilon = float(_epsilon(norm) or 0.0)
        self._kernels = row_kernels(self.weight.device)

    @property
    def arguments(self) -> tuple[np.ndarray, float]:
        """Weight and epsilon as the kernels of the CPU take them."""
        return as_numpy(self.weight.detach()), self.epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., width) -> the same shape."""
        normed = self._kernels.rms_norm(rows.reshape(-1, rows.shape[-1]).contiguous(), self.weight, self.epsilon)
        return normed.view(rows.shape)


def _is_gated_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    linears = _are_alike([children.get(name) for name in ("gate_proj", "up_proj")])
    down = children.get("down_proj")
    sums = isinstance(down, (RowParallelLinear, AdaptedBlockLinear, *_JOINABLE)) or is_plain(down)
    return linears and sums and set(children) == {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedGatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up as one product, which reads the activations once."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = _concatenated([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn
        self.is_silu = _is_silu(mlp.act_fn)
        self._kernels = row_kernels(self.gate_up_proj.weight.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., width) -> the same shape."""
        gate_up = self.gate_up_proj(hidden)
        if self.is_silu:
            multiplied = self._kernels.silu_and_mul(gate_up.flatten(0, -2))
            return self.down_proj(multiplied.view(*hidden.shape[:-1], -1))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate).mul_(up))


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-8, 8, 65)
    return bool(torch.allclose(activation(probe), nn.functional.silu(probe), atol=1e-6))


def _fuse_projections(module: nn.Module) -> int:
    projections: list[Any] = [getattr(module, name, None) for name in PROJECTIONS]
    if not _are_alike(projections):
        return 0
    shared = SharedProjection(projections)
    for index, name in enumerate(PROJECTIONS):
        setattr(module, name, ProjectionPart(shared if index == 0 else None, shared, index))
    return 1


def _are_alike(linears: list[Any]) -> bool:
    """Whether linear layers can be one product, which needs one width, and one type or blocks in all of them.

    If their inputs are different tensors (cross-attention), `SharedProjection.part` notices it.
    """
    for joinable in _JOINABLE:
        if all(isinstance(linear, joinable) for linear in linears):
            return bool(joinable.is_joinable(linears))
    kinds = {(linear.in_features, linear.weight.dtype) if is_plain(linear) else None for linear in linears}
    return len(kinds) == 1 and None not in kinds


class SharedProjection(nn.Module):
    """Several linear layers of the same input as one product.

    The attention module stays as it is and calls its projections one after the other: the first call computes the
    product of all of them, the others find it because they pass the same tensor.
    """

    def __init__(self, projections: list[nn.Linear]) -> None:
        super().__init__()
        self.linear = _concatenated(projections)
        self.widths = [projection.out_features for projection in projections]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def part(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Return output `index` for `hidden`; the call for the first output computes all of them."""
        if hidden is not self._input:  # by identity: a later call may pass an equal tensor
            self._input, self._outputs = hidden, self.linear(hidden).split(self.widths, dim=-1)
        output = self._outputs[index]
        if index == len(self.widths) - 1:
            self._input, self._outputs = None, ()  # activations must not outlive the layer
        return output


class ProjectionPart(nn.Module):
    """One of the projections that a `SharedProjection` computes; the first of them owns it."""

    def __init__(self, owned: SharedProjection | None, shared: SharedProjection, index: int) -> None:
        super().__init__()
        self.shared = owned
        self._part = shared.part
        self._index = index

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., width) -> (..., out_features)."""
        return self._part(hidden, self._index)


def _concatenated(linears: list[Any]) -> nn.Module:
    is_biased = any(linear.bias is not None for linear in linears)
    for joinable in _JOINABLE:
        if isinstance(linears[0], joinable):
            bias = _joined_bias(linears, linears[0].dtype) if is_biased else None
            return type(linears[0]).join(linears, bias)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    return plain_linear(weight, _joined_bias(linears, weight.dtype) if is_biased else None)


def _joined_bias(linears: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features, dtype=dtype) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )
