"""Reads checkpoints in gptq and awq for the CPU as blocks of few bits, without the packages of these formats.

It reads checkpoints of blocks, too, which saved_blocks.py writes: their layers have `blocks` in place of a weight.

Packed layers of the others have `qweight`, `qzeros` and `scales` in place of a weight. A weight is
scale * (number - zero), with a scale and a zero for each group of inputs and each output. transformers loads everything
else: its quantizer here only takes such layers out of the empty model, and puts layers of blocks in their place.

- gptq (AutoGPTQ, GPTQModel): words of 32 bits hold numbers of consecutive inputs; those of 3 bits continue in the next
  word. Format `gptq` stores zeros less one, `gptq_v2` as they are. With act-order `g_idx` has the group of each input:
  inputs are brought into the order of their groups, and so are activations.
- awq (AutoAWQ, version GEMM): words hold numbers of consecutive outputs, in the order of `_AWQ_ORDER`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from handlers.checkpoints.blocks.formats import INPUTS, Q4_0, Q4_ZERO, Q8_0, StoredWeight
from handlers.checkpoints.blocks.layers import KeptLayer
from handlers.checkpoints.blocks.packed_layers import as_blocks, keep_packed
from handlers.checkpoints.blocks.rounding import halves
from handlers.checkpoints.blocks.saved_blocks import BLOCKS, SHARED, saved_layer
from handlers.checkpoints.quantization import GPTQ_BITS
from lmi_server.contract.errors import ModelLoadError

logger = logging.getLogger(__name__)

_METHOD = "packed_layers"  # under which transformers finds the quantizer
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PARTS = ("qweight", "qzeros", "scales")


@register_quantization_config(_METHOD)
class _Packed(QuantizationConfigMixin):
    """What the quantizer gets: the declaration in config.json, and the directory of the checkpoint."""

    def __init__(self, declared: Mapping[str, Any], directory: str, saves: bool, **_: Any) -> None:
        self.quant_method, self.declared, self.directory, self.saves = _METHOD, declared, directory, saves


def as_packed_layers(config: Any, path: str, saves: bool = False) -> Any:
    """Return the configuration of a checkpoint so that transformers reads its packed layers as blocks.

    `saves`: keep what the layers store, for `packed_to_save`. None if it is of another kind: then the packages of its
    format read it.
    """
    declared = getattr(config, "quantization_config", None)
    if not isinstance(declared, dict) or not _is_known(declared) or not _files(Path(path)):
        return None
    changed = copy.deepcopy(config)
    changed.quantization_config = {"quant_method": _METHOD, "declared": declared, "directory": path, "saves": saves}
    return changed


def packed_to_save(model: Any, method: str) -> dict[str, KeptLayer]:
    """Return what the packed layers of a model store as blocks, by name. Raises ModelLoadError if some do not.

    Layers of compressed-tensors become blocks here; those of the others are, if the model was read to be saved.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    kept: dict[str, KeptLayer] = {}
    if isinstance(quantizer, _PackedQuantizer):
        kept, quantizer.kept = quantizer.kept or {}, None
    keep_packed(model, kept)
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


def _is_known(declared: Mapping[str, Any]) -> bool:
    if declared.get("quant_method") == BLOCKS:
        return True
    if declared.get("quant_method") == "awq":
        form = declared.get("version", declared.get("format", "gemm"))
        return str(form).lower() == "gemm" and declared.get("bits", declared.get("w_bit", 4)) == 4
    form = declared.get("checkpoint_format", declared.get("format", "gptq"))
    return declared.get("quant_method") == "gptq" and form in ("gptq", "gptq_v2") and declared.get("bits") in GPTQ_BITS


def _files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint as transformers chooses them. Raises ModelLoadError for a hostile index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} has no weight_map of files ({error}); fetch it again") from error
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: {name!r} is no name of a file in its directory")
    return [directory / name for name in sorted(names)]


@dataclass
class _Tensors:
    """The packed layers of a checkpoint: which open file has each of their tensors, by layer and name in it."""

    directory: Path
    places: Mapping[str, Mapping[str, Any]]

    @classmethod
    def find(cls, directory: Path) -> _Tensors:
        by_layer: dict[str, dict[str, Any]] = {}
        for path in _files(directory):
            file: Any = safe_open(path, framework="pt")  # whose header is read once, and not for each tensor
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                layer, _, part = key.rpartition(".")
                by_layer.setdefault(layer, {})[part] = file
        packed = {layer: parts for layer, parts in by_layer.items() if "qweight" in parts or "blocks" in parts}
        return cls(directory, packed)

    def read(self, layer: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer by their names in it. Raises ModelLoadError if one is missing."""
        places = self.places[layer]
        for part in () if "blocks" in places else _PARTS:
            if part not in places:
                raise ModelLoadError(f"{self.directory}: {layer} has a qweight, but no {part}; fetch the files again")
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


@register_quantizer(_METHOD)
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
                    f"{self._tensors.directory}: {stored_as}.qweight belongs to no linear layer of"
                    f" {type(model).__name__}; use another handler, or a checkpoint that is not quantised"
                )
            model.set_submodule(name, _PackedLayer(model.get_submodule(name), stored_as))
        shared = self.quantization_config.declared.get(SHARED)
        if shared in self._tensors.places:
            model.set_input_embeddings(_PackedLayer(model.get_input_embeddings(), shared))
        names = "|".join(map(re.escape, self._tensors.places))
        own = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*own, rf"^({names})\."}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        declared, tensors = self.quantization_config.declared, self._tensors
        del self._tensors  # and with it the open files: the model keeps its quantizer
        model.config.quantization_config = declared
        model.quantization_method = declared["quant_method"]
        self.kept = {} if self.quantization_config.saves else None
        unpacked = 0
        for name, module in list(model.named_modules()):
            if isinstance(module, _PackedLayer):
                layer = _layer(module, tensors.read(module.stored_as), declared, model.dtype)
                if isinstance(layer, KeptLayer) and self.kept is not None:
                    self.kept[name] = layer
                unpacked += type(layer) is nn.Linear
                model.set_submodule(name, layer.module(model.dtype) if isinstance(layer, KeptLayer) else layer)
        count = len(tensors.places)
        logger.info("%d packed layers are computed as blocks of few bits", count - unpacked)
        if unpacked:
            logger.warning(
                "%d of %d packed layers are unpacked to %s, which takes more memory: blocks have %d inputs each, and"
                " zeros of 8 bits are 128",
                unpacked, count, str(model.dtype).removeprefix("torch."), INPUTS,
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
    packed: _PackedLayer, tensors: Mapping[str, torch.Tensor], declared: Mapping[str, Any], dtype: torch.dtype
) -> KeptLayer | nn.Module:
    """Return what a layer of blocks stores, or a plain layer if blocks cannot hold the weights. Raises ModelLoadError.

    Of saved blocks return the layer, which may be embeddings.
    """
    if "blocks" in tensors:
        return saved_layer(packed, tensors, declared, dtype)
    try:
        weights = _unpack(packed, tensors, declared)
    except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ModelLoadError(
            f"{packed.stored_as} has {shapes}, which are no packed weights of {packed.in_features} inputs and"
            f" {packed.out_features} outputs: {error}"
        ) from error
    bias, stored = packed.bias_of(tensors), weights.blocks()
    if stored is not None:
        return KeptLayer(stored, bias, weights.order)
    linear = nn.Linear(packed.in_features, packed.out_features, bias is not None, "meta", dtype)
    linear.weight = nn.Parameter(weights.plain().to(dtype), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return linear


@dataclass(frozen=True)
class _Weights:
    """Numbers (out, in) uint8; zeros uint8 and scales, both (out, groups); `order` has the inputs by their groups.

    Without an order, inputs are in the order of their groups. `groups` (in,) has the group of each input as stored.
    """

    bits: int
    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor
    order: torch.Tensor | None

    def plain(self) -> torch.Tensor:
        """Return the weights (out, in) float32 as the checkpoint has them."""
        numbers = self.numbers.float() - self.zeros.float()[:, self.groups]
        return numbers * self.scales.float()[:, self.groups]

    def blocks(self) -> StoredWeight | None:
        """Return the weights as blocks, with inputs in the order of their groups. None if blocks do not hold them."""
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        is_even = bool((self.groups.bincount(minlength=groups) * groups == inputs).all())
        if (
            not is_even
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


def _unpack(packed: _PackedLayer, tensors: Mapping[str, torch.Tensor], declared: Mapping[str, Any]) -> _Weights:
    words, zero_words, scales = (tensors[part] for part in _PARTS)
    inputs, outputs, groups = packed.in_features, packed.out_features, len(scales)
    if words.dtype != torch.int32 or zero_words.dtype != torch.int32 or not scales.is_floating_point():
        raise ValueError(f"their types are {words.dtype}, {zero_words.dtype} and {scales.dtype}")
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
    in_order = torch.arange(inputs) // (inputs // groups)
    of_inputs = tensors.get("g_idx", in_order).long()
    if of_inputs.shape != (inputs,) or int(of_inputs.min()) < 0 or int(of_inputs.max()) >= groups:
        raise ValueError("g_idx names other groups")
    order = None if bool((of_inputs.diff() >= 0).all()) else torch.argsort(of_inputs, stable=True)
    return _Weights(bits, numbers.T.contiguous(), zeros.T.contiguous(), scales.T.contiguous(), of_inputs, order)


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
