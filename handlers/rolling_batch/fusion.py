"""Faster modules in the place of a transformers model's own, on the CPU.

A module is recognised by its structure and replaced only where the replacement gives the same result on a random
input, so that a model family with a variant of its own keeps its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from handlers.checkpoints.quantization import Int8Linear
from handlers.rolling_batch.attention import AttentionLayer, SlotAttention, StepRows, as_numpy
from handlers.rolling_batch.sharding import SummedLinear

_DECODE_ROWS = 32  # the row count that oneDNN lays the weights out for
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def fuse(model: nn.Module) -> dict[str, int]:
    """Replace what can be replaced in `model` (on the CPU, float32 or bfloat16); return how many of each kind."""
    counts = {"norms": 0, "attentions": 0, "mlps": 0, "linears": 0}
    for module in list(model.modules()):
        counts["attentions"] += _fuse_projections(module)
        for name, child in list(module.named_children()):
            counts["norms"] += _replace(module, name, child, _is_rms_norm, FusedRMSNorm)
            counts["mlps"] += _replace(module, name, child, _is_gated_mlp, FusedGatedMLP)
    if next(model.parameters()).dtype == torch.bfloat16:
        counts["linears"] = _pack_linears(model)
    return counts


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


def _same_result(original: nn.Module, fused: nn.Module) -> bool:
    parameter = next(original.parameters())
    width = parameter.shape[-1]
    rows = torch.randn((1, 5, width), generator=torch.Generator().manual_seed(0)).to(parameter.dtype)
    with torch.inference_mode():
        return _close(original(rows), fused(rows))


def _close(expected: torch.Tensor, computed: torch.Tensor) -> bool:
    """Whether two results differ by no more than rounding: bfloat16 rounds by up to 0.4 %, several times in a layer."""
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
        from handlers.rolling_batch.kernels import rms_norm

        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self._kernel = rms_norm
        self._weight = as_numpy(self.weight.detach())
        self._eps = float(_epsilon(norm) or 0.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(..., width) -> the same shape."""
        flat = rows.reshape(-1, rows.shape[-1])
        out = torch.empty_like(flat)
        self._kernel(as_numpy(flat), self._weight, as_numpy(out), self._eps)
        return out.view(rows.shape)


def _is_plain(module: Any) -> bool:
    """Whether a module multiplies by its weight and adds its bias, and nothing else.

    A subclass computes its own way; compressed-tensors and accelerate put a `forward` of theirs on the instance.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return not (module._forward_pre_hooks or module._forward_hooks) and module.weight.is_floating_point()


def _is_gated_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    linears = all(_is_plain(children.get(name)) for name in ("gate_proj", "up_proj"))
    down = children.get("down_proj")
    sums = isinstance(down, SummedLinear) or _is_plain(down)
    return linears and sums and set(children) == {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedGatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up as one product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = _concatenated([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn
        self._is_silu = _is_silu(mlp.act_fn)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., width) -> the same shape."""
        gate_up = self.gate_up_proj(hidden)
        if self._is_silu:
            return self.down_proj(_silu_and_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate).mul_(up))


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-8, 8, 65)
    return torch.allclose(activation(probe), nn.functional.silu(probe), atol=1e-6)


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    from handlers.rolling_batch.kernels import silu_and_mul

    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    silu_and_mul(as_numpy(gate_up.flatten(0, -2)), as_numpy(out.flatten(0, -2)))
    return out


def _fuse_projections(module: nn.Module) -> int:
    projections = [getattr(module, name, None) for name in _PROJECTIONS]
    if not all(_is_plain(projection) for projection in projections):
        return 0
    if len({(projection.in_features, projection.weight.dtype) for projection in projections}) > 1:
        return 0
    shared = SharedProjection(projections)
    for index, name in enumerate(_PROJECTIONS):
        setattr(module, name, ProjectionPart(shared if index == 0 else None, shared, index))
    return 1


class SharedProjection(nn.Module):
    """Several linear layers of one input as one product; the parts ask for it one after the other."""

    def __init__(self, projections: list[nn.Linear]) -> None:
        super().__init__()
        self.linear = _concatenated(projections)
        self.widths = [projection.out_features for projection in projections]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def part(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Return output `index` for `hidden`; the product is made when the first part asks."""
        if hidden is not self._input:
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


def fuse_decoder_layers(model: nn.Module, layers: list[AttentionLayer], attention: SlotAttention) -> int:
    """Replace decoder layers of Llama's structure, their modules fused already; return how many."""
    owners = {id(layer.module): layer for layer in layers}
    rotary = _rotary_of(model)
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            layer = owners.get(id(getattr(child, "self_attn", None)))
            if layer and _is_llama_layer(child, layer):
                fused = FusedDecoderLayer(child, layer, attention)
                if _same_layer(child, fused, rotary, attention):
                    setattr(module, name, fused)
                    count += 1
    return count


def _is_llama_layer(module: Any, layer: AttentionLayer) -> bool:
    if set(dict(module.named_children())) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention = module.self_attn
    norms = (module.input_layernorm, module.post_attention_layernorm)
    return (
        set(dict(attention.named_children())) == {*_PROJECTIONS, "o_proj"}
        and isinstance(attention.q_proj, ProjectionPart)
        and isinstance(module.mlp, FusedGatedMLP)
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
        and layer.shape.head_dim == layer.shape.value_dim
    )


def _rotary_of(model: nn.Module) -> nn.Module | None:
    """Return the module that makes the model's rotary position embeddings."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    return found[0] if found else None


def _same_layer(
    original: nn.Module, fused: FusedDecoderLayer, rotary: nn.Module | None, attention: SlotAttention
) -> bool:
    """Compare what both add to random activations, at positions so far apart that rotation matters."""
    if rotary is None:
        return False
    norm = fused.input_layernorm.weight
    positions = torch.tensor([[0, 11, 37, 80, 150, 333, 700]])
    rows = torch.randn((1, 7, norm.shape[0]), generator=torch.Generator().manual_seed(0)).to(norm.dtype)
    added = []
    with torch.inference_mode():
        embeddings = rotary(rows, positions)
        for layer in (original, fused):
            attention.begin(StepRows(np.zeros(7, np.int64), np.arange(7), []))
            out = layer(rows, position_embeddings=embeddings, attention_mask=None, past_key_values=None)
            added.append(out - rows)
    return _close(*added)


class FusedDecoderLayer(nn.Module):
    """A decoder layer of Llama's structure in eight passes over its activations."""

    def __init__(self, original: Any, layer: AttentionLayer, attention: SlotAttention) -> None:
        super().__init__()
        from handlers.rolling_batch.kernels import rotate

        self.input_layernorm = original.input_layernorm
        self.qkv_proj = original.self_attn.q_proj.shared.linear
        self.o_proj = original.self_attn.o_proj
        self.post_attention_layernorm = original.post_attention_layernorm
        self.mlp = original.mlp
        self._rotate = rotate
        self._attention = attention
        self._settings = layer.settings
        self._owner = _LayerIndex(layer.module.layer_idx)
        self._dim = layer.shape.head_dim
        self._kv_heads = layer.shape.kv_heads
        self._heads = self.qkv_proj.out_features // self._dim - 2 * self._kv_heads
        self.qkv_widths = tuple(heads * self._dim for heads in (self._heads, self._kv_heads, self._kv_heads))

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """(1, rows, width) -> the same shape; cosines and sines are (1, rows, head_dim)."""
        attended = self._attend(self.qkv_proj(self.input_layernorm(hidden))[0], position_embeddings)
        hidden = hidden + self.o_proj(attended.flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _attend(self, qkv: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cosines, sines = position_embeddings
        rotated = self._heads + self._kv_heads
        self._rotate(as_numpy(qkv), as_numpy(cosines[0]), as_numpy(sines[0]), rotated)
        heads = qkv.unflatten(1, (-1, self._dim)).transpose(0, 1)
        query, key, value = heads.split((self._heads, self._kv_heads, self._kv_heads))
        return self._attention(self._owner, query[None], key[None], value[None], None, **self._settings)[0]


class _LayerIndex(nn.Module):
    """What an attention function asks of the module that calls it."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


@dataclass(frozen=True)
class LinearPlace:
    """Where a linear layer of the model as it was loaded is computed: columns `first:last` of what `module` returns."""

    module: nn.Module
    first: int
    last: int

    @property
    def in_features(self) -> int:
        return _widths(self.module)[0]

    @property
    def out_features(self) -> int:
        return _widths(self.module)[1]


def linear_places(model: nn.Module) -> dict[str, LinearPlace]:
    """Return the place of each linear layer by the name that it had before anything was fused."""
    places: dict[str, LinearPlace] = {}
    shared: set[nn.Module] = set()  # modules that have a name of ours only
    for name, module in model.named_modules():
        found = dict(_fused_places(name, module))
        shared.update(place.module for place in found.values() if (place.first, place.last) != (0, place.out_features))
        if not found and module not in shared and _is_linear(module):
            found = {name: LinearPlace(module, 0, _widths(module)[1])}
        places = {**found, **places}
    return places


def _fused_places(name: str, module: nn.Module) -> Iterator[tuple[str, LinearPlace]]:
    """Yield what a fused module computes, by the names of before; nothing for any other module."""
    prefix = f"{name}." if name else ""
    if isinstance(module, FusedDecoderLayer):
        attention = f"{prefix}self_attn."
        yield from _columns(module.qkv_proj, [attention + name for name in _PROJECTIONS], module.qkv_widths)
        yield f"{attention}o_proj", LinearPlace(module.o_proj, 0, module.o_proj.out_features)
    elif isinstance(module, FusedGatedMLP):
        width = module.gate_up_proj.out_features // 2
        yield from _columns(module.gate_up_proj, [f"{prefix}gate_proj", f"{prefix}up_proj"], (width, width))
    elif isinstance(module, ProjectionPart) and module.shared is not None:
        parent = prefix.removesuffix(f"{_PROJECTIONS[0]}.")
        yield from _columns(module.shared.linear, [parent + name for name in _PROJECTIONS], module.shared.widths)


def _columns(module: nn.Module, names: list[str], widths: Iterable[int]) -> Iterator[tuple[str, LinearPlace]]:
    first = 0
    for name, width in zip(names, widths, strict=True):
        yield name, LinearPlace(module, first, first + width)
        first += width


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, PackedLinear, Int8Linear)) or type(module).__name__ == "Conv1D"  # GPT-2's


def _widths(module: Any) -> tuple[int, int]:
    """Return the widths of what a linear layer takes and gives."""
    if type(module).__name__ == "Conv1D":
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def _concatenated(linears: list[nn.Linear]) -> nn.Linear:
    biased = any(linear.bias is not None for linear in linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=biased, device="meta", dtype=weight.dtype)
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if biased:
        biases = [
            weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in linears
        ]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def _pack_linears(model: nn.Module) -> int:
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if _is_plain(child):
                setattr(module, name, PackedLinear(child))
                count += 1
    return count


class PackedLinear(nn.Module):
    """A linear layer whose bfloat16 weight is laid out for oneDNN once instead of in every call.

    The operators are those that torch.compile's own freezing pass emits for a constant weight.
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
