"""Which module computes each linear layer of a model after fusion, for adapters to change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from handlers.checkpoints.adapter_layers import Widths, is_conv1d, module_widths
from handlers.checkpoints.blocks.layers import AdaptedBlockLinear, BlockLinear
from handlers.checkpoints.fp8.layers import Fp8Linear
from handlers.checkpoints.grouped.layers import GroupedLinear
from handlers.checkpoints.quantization import Int8Linear
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear
from handlers.rolling_batch.fused.decoder_layers import FusedDecoderLayer
from handlers.rolling_batch.fused.modules import PROJECTIONS, FusedGatedMLP, ProjectionPart


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer of the model as it was loaded: columns `first:last` of what `module` returns now."""

    module: nn.Module
    first: int
    last: int

    @property
    def out_features(self) -> int:
        """Outputs of the module; the layer computes some or all of them."""
        return module_widths(self.module).outputs

    @property
    def widths(self) -> Widths:
        return Widths(module_widths(self.module).inputs, self.last - self.first)


def head_modules(model: Any) -> frozenset[nn.Module]:
    """Return the modules that compute logits from hidden states: often one, several in RoBERTa."""
    inner = frozenset(getattr(model, "base_model", model).modules())  # a part of a model has none
    outer = frozenset() if model in inner else frozenset(model.modules()) - inner
    return outer | {model.get_output_embeddings()}


def lora_targets(model: nn.Module) -> dict[str, LoraTarget]:
    """Return the target of each linear layer by its name before fusion, which adapters use."""
    targets: dict[str, LoraTarget] = {}
    shared: set[nn.Module] = set()  # fused modules, whose names no adapter knows
    for name, module in model.named_modules():
        found = dict(_fused_targets(name, module))
        shared.update(
            target.module for target in found.values() if (target.first, target.last) != (0, target.out_features)
        )
        if not found and module not in shared and _is_linear(module):
            found = {name: LoraTarget(module, 0, module_widths(module).outputs)}
        targets = {**found, **targets}
    former_name = getattr(model, "former_name", str)  # of a part of a model
    return {former_name(name): target for name, target in targets.items()}


def _fused_targets(name: str, module: nn.Module) -> Iterator[tuple[str, LoraTarget]]:
    """Yield the linear layers that a fused module computes, by their former names; nothing for any other module."""
    prefix = f"{name}." if name else ""
    if isinstance(module, FusedDecoderLayer):
        attention = f"{prefix}self_attn."
        yield from _columns(module.qkv_proj, [attention + name for name in PROJECTIONS], module.qkv_widths)
        yield f"{attention}o_proj", LoraTarget(module.o_proj, 0, module.o_proj.out_features)
    elif isinstance(module, FusedGatedMLP):
        width = module.gate_up_proj.out_features // 2
        yield from _columns(module.gate_up_proj, [f"{prefix}gate_proj", f"{prefix}up_proj"], (width, width))
    elif isinstance(module, ProjectionPart) and module.shared is not None:
        parent = prefix.removesuffix(f"{PROJECTIONS[0]}.")
        yield from _columns(module.shared.linear, [parent + name for name in PROJECTIONS], module.shared.widths)


def _columns(module: nn.Module, names: list[str], widths: Iterable[int]) -> Iterator[tuple[str, LoraTarget]]:
    first = 0
    for name, width in zip(names, widths, strict=True):
        yield name, LoraTarget(module, first, first + width)
        first += width


def _is_linear(module: nn.Module) -> bool:
    kinds = (
        nn.Linear,
        TiledLinear,
        PackedLinear,
        BlockLinear,
        AdaptedBlockLinear,
        Int8Linear,
        Fp8Linear,
        GroupedLinear,
    )
    return isinstance(module, kinds) or is_conv1d(module)
