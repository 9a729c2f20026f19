"""Reads packed checkpoints (gptq, awq, compressed-tensors, fp8) without the packages of these formats.

Packed layers have other tensors in place of a weight; stored_numbers.py reads these. On the CPU they become blocks of
few bits, on a GPU numbers with scales of groups. It reads checkpoints of blocks, too, which saved_blocks.py writes:
their layers have `blocks`. transformers loads everything else: its quantizer here only takes such layers out of the
empty model, and puts others in their place.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from handlers.checkpoints.blocks.formats import INPUTS
from handlers.checkpoints.blocks.layers import KeptLayer
from handlers.checkpoints.blocks.saved_blocks import BLOCKS, SHARED, saved_layer
from handlers.checkpoints.blocks.stored_numbers import StoredNumbers, is_known, is_packed, missing_part, read_numbers
from handlers.checkpoints.fp8.layers import Fp8Linear, multiplies_float8
from handlers.checkpoints.grouped.layers import MIN_CHUNK, GroupedLinear
from handlers.checkpoints.placement import main_device
from handlers.checkpoints.quantization import OWN_METHOD
from lmi_server.contract.errors import ModelLoadError, first_line
from lmi_server.contract.texts.quoting import excerpt

logger = logging.getLogger(__name__)

_EXPERTS = ".experts."
_NUMBER = re.compile(r"\d+")
# Whether on a GPU: how packed layers are computed, and why some are not.
_WAYS = {False: "as blocks of few bits", True: "by kernels of this project as they are packed"}
_REASONS = {
    False: f"blocks hold integers of {INPUTS} inputs each, and zeros of 8 bits are 128",
    True: f"the kernels read groups of a multiple of {MIN_CHUNK} inputs",
}


@register_quantization_config(OWN_METHOD)
class _Packed(QuantizationConfigMixin):
    """What the quantizer gets: the declaration in config.json, and the directory of the checkpoint."""

    def __init__(self, declared: Mapping[str, Any], directory: str, saves: bool, on_gpu: bool, **_: Any) -> None:
        self.quant_method, self.declared, self.directory = OWN_METHOD, declared, directory
        self.saves, self.on_gpu = saves, on_gpu


def as_packed_layers(config: Any, path: str, saves: bool = False, on_gpu: bool = False) -> Any:
    """Return the configuration of a checkpoint so that transformers leaves its packed layers to this module.

    `saves`: keep what the layers store, for `packed_to_save`. None if it is of another kind: then the packages of its
    format read it.
    """
    declared = getattr(config, "quantization_config", None)
    if not isinstance(declared, dict) or not _is_read(declared, saves, on_gpu) or not _files(Path(path)):
        return None
    if declared["quant_method"] in ("fp8", "compressed-tensors") and _has_experts(Path(path)):
        return None
    given = {"declared": declared, "directory": path, "saves": saves, "on_gpu": on_gpu}
    changed = copy.deepcopy(config)
    changed.quantization_config = {"quant_method": OWN_METHOD, **given}
    return changed


def packed_to_save(model: Any, method: str) -> dict[str, KeptLayer]:
    """Return what the packed layers of a model store as blocks, by name. Raises ModelLoadError if some do not."""
    quantizer = getattr(model, "hf_quantizer", None)
    kept: dict[str, KeptLayer] = {}
    if isinstance(quantizer, _PackedQuantizer):
        kept, quantizer.kept = quantizer.kept or {}, None
    left = [name for name, module in model.named_modules() if _is_packed(module)]
    if left:
        raise ModelLoadError(
            f"option.save_mp_checkpoint_path: {len(left)} layers of {method}, {left[0]} among them, are not held in"
            " blocks of 4 or 8 bits on a CPU in bf16 or fp32, and only those are saved again; serve the checkpoint as"
            " it is"
        )
    return kept


def _is_packed(module: Any) -> bool:
    """Whether a layer is packed in the way of a library."""
    return hasattr(module, "qweight") or getattr(module, "quantization_scheme", None) is not None


def _is_read(declared: Mapping[str, Any], saves: bool, on_gpu: bool) -> bool:
    """Whether packed layers are read here, as config.json declares them."""
    if declared.get("quant_method") == BLOCKS:
        return not on_gpu
    if on_gpu:
        return is_known(declared) and not saves
    is_float = declared.get("quant_method") == "fp8" or declared.get("format") == "float-quantized"
    rounds = declared.get("format") in ("int-quantized", "naive-quantized")  # 8 bits of the library for activations
    return is_known(declared) and not rounds and not (saves and is_float)


def _has_experts(directory: Path) -> bool:
    """Whether a checkpoint has mixtures of experts, whose layers transformers joins while it reads them."""
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                if any(_EXPERTS in key for key in file.keys()):  # noqa: SIM118 - it is no mapping
                    return True
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelLoadError(f"{path} cannot be read ({first_line(error)}); fetch it again") from error
    return False


def _files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint as transformers chooses them. Raises ModelLoadError for a hostile index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index} has no weight_map of files ({error}); fetch it again") from error
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: {excerpt(name)!r} is no name of a file in its directory")
    return [directory / name for name in sorted(names)]


@dataclass
class _Tensors:
    """The packed layers of a checkpoint: which open file has each of their tensors, by layer and name in it."""

    directory: Path
    places: Mapping[str, Mapping[str, Any]]
    plain: Set[str]  # layers with a weight that is not packed

    @classmethod
    def find(cls, directory: Path) -> _Tensors:
        by_layer: dict[str, dict[str, Any]] = {}
        for path in _files(directory):
            file: Any = safe_open(path, framework="pt")  # whose header is read once, and not for each tensor
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                layer, _, part = key.rpartition(".")
                by_layer.setdefault(layer, {})[part] = file
        packed = {layer: parts for layer, parts in by_layer.items() if "blocks" in parts or is_packed(parts)}
        return cls(directory, packed, {layer for layer, parts in by_layer.items() if "weight" in parts} - packed.keys())

    def has_weight(self, model: Any, name: str) -> bool:
        """Whether the files have a weight of a module that is not packed."""
        base = f"{model.base_model_prefix}."
        return not self.plain.isdisjoint((name, name.removeprefix(base), base + name))

    def read(self, layer: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer by their names in it. Raises ModelLoadError if one is missing."""
        places = self.places[layer]
        missing = None if "blocks" in places else missing_part(places)
        if missing is not None:
            raise ModelLoadError(
                f"{self.directory}: {excerpt(layer)} has packed weights, but no {missing}; fetch the files again"
            )
        return {part: file.get_tensor(f"{layer}.{part}") for part, file in places.items()}


class _PackedLayer(nn.Module):
    """Stands for a layer whose tensors transformers does not read."""

    def __init__(self, module: nn.Module, stored_as: str) -> None:
        super().__init__()
        self.is_embedding = isinstance(module, nn.Embedding)
        weight: Any = module.weight
        self.out_features, self.in_features = weight.shape
        self.stored_as = stored_as

    def bias_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the bias among the layer's tensors. Raises ModelLoadError if it is of another layer."""
        bias = tensors.get("bias")
        if bias is not None and (bias.shape != (self.out_features,) or not bias.is_floating_point()):
            raise ModelLoadError(
                f"{self.stored_as}: a bias {tuple(bias.shape)} of {bias.dtype} is none of {self.out_features} outputs;"
                " fetch the files again"
            )
        return bias


@register_quantizer(OWN_METHOD)
class _PackedQuantizer(HfQuantizer):
    """Puts layers of blocks in the place of packed ones."""

    requires_calibration = True
    is_trainable = False
    kept: dict[str, KeptLayer] | None = None
    """What the layers of blocks store, by name, if the model is to be saved."""

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self._tensors = _Tensors.find(Path(self.quantization_config.directory))
        for stored_as in self._tensors.places:
            name = _module_name(model, stored_as)
            if name is None:
                raise ModelLoadError(
                    f"{self._tensors.directory}: {excerpt(stored_as)} is packed, and belongs to no linear layer of"
                    f" {type(model).__name__}; use another handler, or a checkpoint that is not quantised"
                )
            model.set_submodule(name, _PackedLayer(model.get_submodule(name), stored_as))
        shared = self.quantization_config.declared.get(SHARED)
        if shared in self._tensors.places:
            model.set_input_embeddings(_PackedLayer(model.get_input_embeddings(), shared))
        self._refuse_absent_layers(model)
        names = "|".join(map(re.escape, self._tensors.places))
        own = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*own, rf"^({names})\."}

    def _refuse_absent_layers(self, model: Any) -> None:
        """Refuse a layer without tensors whose like are packed: transformers would give it random weights."""
        packed = [name for name, module in model.named_modules() if isinstance(module, _PackedLayer)]
        alike = {_NUMBER.sub("", name) for name in packed}
        for name, module in model.named_modules():
            if (
                type(module) is nn.Linear
                and _NUMBER.sub("", name) in alike
                and not self._tensors.has_weight(model, name)
            ):
                raise ModelLoadError(
                    f"{self._tensors.directory}: {name} has no tensors, and layers like it are packed; fetch the files"
                    " again"
                )

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        declared, tensors = self.quantization_config.declared, self._tensors
        del self._tensors  # and with it the open files: the model keeps its quantizer
        model.config.quantization_config = declared
        model.quantization_method = declared["quant_method"]
        self.kept = {} if self.quantization_config.saves else None
        unpacked, on_gpu, device = 0, self.quantization_config.on_gpu, main_device(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, _PackedLayer):
                parts = {part: tensor.to(device) for part, tensor in tensors.read(module.stored_as).items()}
                layer = _layer(module, parts, declared, model.dtype, on_gpu)
                if isinstance(layer, KeptLayer) and self.kept is not None:
                    self.kept[name] = layer
                unpacked += type(layer) is nn.Linear
                model.set_submodule(name, layer.module(model.dtype) if isinstance(layer, KeptLayer) else layer)
        count = len(tensors.places)
        if unpacked < count:
            logger.info("%d packed layers are computed %s", count - unpacked, _WAYS[on_gpu])
        if unpacked:
            logger.warning(
                "%d of %d packed layers are unpacked to %s, which takes more memory: %s",
                unpacked, count, str(model.dtype).removeprefix("torch."), _REASONS[on_gpu],
            )  # fmt: skip


def _module_name(model: Any, stored_as: str) -> str | None:
    """Return the name of a linear layer in a model, which may have a base model or be one."""
    base = f"{model.base_model_prefix}."
    for name in (stored_as, stored_as.removeprefix(base), base + stored_as):
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if type(module) is nn.Linear:
            return name
    return None


def _layer(
    packed: _PackedLayer,
    tensors: Mapping[str, torch.Tensor],
    declared: Mapping[str, Any],
    dtype: torch.dtype,
    on_gpu: bool,
) -> KeptLayer | nn.Module:
    """Return what a layer of blocks stores, or a layer of another kind. Raises ModelLoadError.

    Layers are plain ones if blocks, or the kernels of a GPU, do not hold the weights. Of saved blocks return the layer,
    which may be embeddings.
    """
    if "blocks" in tensors:
        return saved_layer(packed, tensors, declared, dtype)
    try:
        weights = read_numbers(tensors, (packed.out_features, packed.in_features), declared)
    except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{excerpt(name)} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ModelLoadError(
            f"{packed.stored_as} has {shapes}, which are no packed weights of {packed.in_features} inputs and"
            f" {packed.out_features} outputs: {error}; fetch the files again, or name another checkpoint in"
            " option.model_id"
        ) from error
    bias = packed.bias_of(tensors)
    layer = _gpu_layer(weights, bias, dtype) if on_gpu else _block_layer(weights, bias)
    return _plain_layer(weights, bias, dtype) if layer is None else layer


def _block_layer(weights: StoredNumbers, bias: torch.Tensor | None) -> KeptLayer | None:
    stored = weights.blocks()
    return None if stored is None else KeptLayer(stored, bias, weights.order)


def _gpu_layer(weights: StoredNumbers, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Module | None:
    """Return a layer of numbers with scales. One scale for an output is what tensor cores for 8-bit floats take."""
    held = weights.grouped()
    if held is None or not held.is_grouped():
        return None
    of_outputs = held.zeros is None and held.scales.shape[1] == 1 and dtype == torch.bfloat16
    if of_outputs and multiplies_float8(held.numbers.device, tuple(held.numbers.shape)):
        return Fp8Linear(held.numbers, held.scales[:, 0].float(), bias if bias is None else bias.to(dtype), dtype)
    return GroupedLinear(held, bias, dtype)


def _plain_layer(weights: StoredNumbers, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Module:
    outputs, inputs = weights.numbers.shape
    linear = nn.Linear(inputs, outputs, bias is not None, "meta", dtype)
    linear.weight = nn.Parameter(weights.plain().to(dtype), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return linear
