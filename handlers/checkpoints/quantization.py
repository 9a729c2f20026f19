"""Quantised weights: bitsandbytes quantises them while a model loads, or the checkpoint is quantised already."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from handlers.checkpoints.grouped.layers import GroupedLinear, GroupedWeight, has_gpu_kernels
from handlers.checkpoints.options import QUANTIZATION, QUANTIZATION_PACKAGES, TransformersOptions
from handlers.checkpoints.placement import is_spread
from handlers.torch_operators import probes
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.texts.quoting import excerpt

# Up to so many rows torch's kernel for int8 weights is faster than widening them, in bfloat16; in float32 it never is.
_INT8_KERNEL_ROWS = 16
# How weights lie in a checkpoint: what gptqmodel has kernels for on GPUs alone, and what is read on CPUs.
_GPU_LAYOUTS = ("marlin", "bitblas", "gemv", "gemv_fast", "llm-awq")
_ON_CPUS = {"gptq": "the layout gptq or gptq_v2", "awq": "the layout gemm"}
OWN_METHOD = "packed_layers"
"""The name under which transformers finds the quantizer that reads packed layers by code of this project."""
GPTQ_BITS = (2, 3, 4, 8)
"""Bits of the numbers of gptq that transformers, and this project, read."""
# The first is of bitsandbytes, and never left on the CPU; the others are of this project.
_ROUNDING = ("Linear8bitLt", "Fp8Linear", "Int8BlockLinear")


def quantization_arguments(options: TransformersOptions, config: Any, dtype: torch.dtype | str) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` quantises while it loads; none if the checkpoint is quantised.

    Raises ModelLoadError if the options contradict the checkpoint, or if a package is missing.
    """
    check_quantization(options.quantize, config)
    _refuse_bits(config)
    checkpoint = checkpoint_method(config)
    _refuse_unknown_method(checkpoint)
    _refuse_missing_packages(checkpoint or ("bitsandbytes" if options.quantize in QUANTIZATION else None))
    wanted = options.quantization_config()
    if wanted is None or checkpoint is not None:
        return {}
    from transformers import BitsAndBytesConfig

    # bitsandbytes computes 4-bit layers in float32 unless it is given the model's own data type.
    if "load_in_4bit" in wanted:
        stored = getattr(config, "dtype", None) or torch.float32
        wanted = {**wanted, "bnb_4bit_compute_dtype": dtype if isinstance(dtype, torch.dtype) else stored}
    return {"quantization_config": BitsAndBytesConfig(**wanted)}


def refuse_malformed_declaration(directory: Path) -> None:
    """Refuse a quantization_config that is no object with the name of a method. Raises ModelLoadError."""
    try:
        declared = json.loads((directory / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # transformers says what is wrong
    if declared is None:
        return
    if not isinstance(declared, dict) or not isinstance(declared.get("quant_method", ""), str):
        raise ModelLoadError(
            f"{directory / 'config.json'}: quantization_config is {excerpt(json.dumps(declared))}, and no object whose"
            " quant_method is a text; fetch the file again, or name another checkpoint in option.model_id"
        )


def check_quantization(wanted: str | None, config: Any) -> None:
    """Raise ModelLoadError if option.quantize contradicts the checkpoint."""
    checkpoint = checkpoint_method(config)
    if checkpoint is not None and wanted is not None and wanted not in _names_of(checkpoint, config):
        raise ModelLoadError(
            f"option.quantize={wanted}, but the checkpoint is quantised with {checkpoint} already"
            " (quantization_config in config.json); remove the key"
        )


def checkpoint_method(config: Any) -> str | None:
    """Return the method with which a checkpoint is quantised, as its config.json says."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    method = declared.get("quant_method") if isinstance(declared, Mapping) else declared.quant_method
    return str(getattr(method, "value", method) or "bitsandbytes")  # old checkpoints of bitsandbytes do not say


def refuse_gpu_layouts(config: Any) -> None:
    """Refuse weights that lie as a kernel for GPUs reads them: no package has one for CPUs. Raises ModelLoadError."""
    declared = getattr(config, "quantization_config", None)
    method = checkpoint_method(config)
    if not isinstance(declared, Mapping) or method not in _ON_CPUS:
        return
    names = (declared.get(name) for name in ("checkpoint_format", "format", "version"))
    layout = next((name.lower() for name in names if isinstance(name, str)), "")
    if declared.get("is_marlin_format") is True:
        layout = "marlin"
    if layout in _GPU_LAYOUTS:
        raise ModelLoadError(
            f"quantization_config in config.json: {method} weights in the layout {layout} are for GPUs; on CPUs name a"
            f" checkpoint in {_ON_CPUS[method]} in option.model_id"
        )


def _refuse_unknown_method(method: str | None) -> None:
    """Refuse methods that transformers does not know: it would give the layers random weights. Raises ModelLoadError.

    This project's own method is none of a checkpoint: it names a directory.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if method in (None, "bitsandbytes") or (method != OWN_METHOD and method in AUTO_QUANTIZER_MAPPING):
        return
    raise ModelLoadError(
        f"quantization_config in config.json: quant_method is {excerpt(str(method))}, which the installed transformers"
        " does not read; name a checkpoint that is quantised otherwise, or not, in option.model_id"
    )


def _refuse_bits(config: Any) -> None:
    """Refuse gptq in numbers of bits that transformers does not read. Raises ModelLoadError."""
    if checkpoint_method(config) != "gptq":
        return
    declared = config.quantization_config
    bits = declared.get("bits") if isinstance(declared, Mapping) else declared.bits
    if bits not in GPTQ_BITS:
        raise ModelLoadError(
            f"quantization_config in config.json: bits is {excerpt(str(bits))}, and transformers reads gptq in 2, 3, 4"
            " and 8 bits; name a checkpoint in one of these in option.model_id"
        )


def _names_of(method: str, config: Any) -> tuple[str, ...]:
    """Return the values of option.quantize that mean a checkpoint of `method`."""
    if method != "bitsandbytes":
        return (method,)
    declared = config.quantization_config
    values = declared if isinstance(declared, Mapping) else declared.to_dict()
    return ("bitsandbytes", "bitsandbytes4" if values.get("load_in_4bit") else "bitsandbytes8")


def _refuse_missing_packages(method: str | None) -> None:
    extra, packages = QUANTIZATION_PACKAGES.get(method or "", ("", ()))
    missing = [name.replace("_", "-") for name in packages if find_spec(name) is None]
    if missing:
        raise ModelLoadError(
            f"weights quantised with {method} need {', '.join(missing)}, which is not installed;"
            f" install lmi-server[{extra}]"
        )


def quantization_details(model: Any) -> dict[str, Any]:
    """Return how the weights of `model` are quantised, and their MiB with and without; nothing if they are not."""
    method = checkpoint_method(model.config)
    if method in (None, "gguf"):  # weights in GGUF are unpacked
        return {}
    plain = type(model.config).from_dict({**model.config.to_dict(), "quantization_config": None})
    with torch.device("meta"):
        full = type(model)(plain)
    unquantized = sum(parameter.numel() for parameter in full.parameters()) * model.dtype.itemsize
    return weight_details(method, model.get_memory_footprint(), unquantized)


def weight_details(quantization: str | None, size: int, unquantized: int) -> dict[str, Any]:
    """Return what the log says of quantised weights, whose sizes are in bytes."""
    sizes = {"weights_mib": size, "unquantized_weights_mib": unquantized}
    return {"quantization": quantization, **{name: round(size / 2**20, 1) for name, size in sizes.items()}}


def rounds_activations(model: Any) -> bool:
    """Return whether layers round their inputs: 8-bit floats on GPUs, and the W8A8 of compressed-tensors' library."""
    return any(type(module).__name__ in _ROUNDING or _has_rounded_inputs(module) for module in model.modules())


def _has_rounded_inputs(module: Any) -> bool:
    scheme = getattr(module, "quantization_scheme", None)
    return scheme is not None and scheme.input_activations is not None


def keep_activations(model: Any) -> int:
    """Replace bitsandbytes' 8-bit layers by layers that do not round activations; return how many.

    Of a model that is spread over several devices, those on the CPU alone: accelerate has hooks on the others. So it is
    where a GPU does not run the kernels.
    """
    if "bitsandbytes" not in sys.modules:  # transformers has imported it if the model has such layers
        return 0
    from bitsandbytes.nn.modules import Linear8bitLt

    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, Linear8bitLt):
                continue
            kept = Int8Linear(child, model.dtype) if child.weight.device.type == "cpu" else None
            if kept is None and not is_spread(model) and has_gpu_kernels():
                kept = grouped_8_bits(child, model.dtype)
            if kept is not None:
                setattr(module, name, kept)
                count += 1
    return count


def grouped_8_bits(linear: Any, dtype: torch.dtype) -> GroupedLinear | None:
    """Return an 8-bit layer of bitsandbytes as kernels of this project compute it on a GPU; None if they do not."""
    scales = linear.weight.SCB if linear.weight.SCB is not None else linear.state.SCB
    numbers = linear.weight.data.view(torch.uint8) ^ 128
    by_output = scales.float()[:, None] / 127
    held = GroupedWeight(8, numbers, by_output, torch.full_like(by_output, 128, dtype=torch.uint8))
    return GroupedLinear(held, linear.bias, dtype) if held.is_grouped() else None


def leave_uncompiled(model: nn.Module) -> int:
    """Let gptqmodel's layers on the CPU unpack their weights without torch.compile; return how many.

    It compiles for each number of bits and each shape in the first passes, which takes minutes on two busy cores.
    Layers with a kernel of torch (4 bits) compile nothing.
    """
    count = 0
    for module in model.modules():
        if "dequantize_weight" in vars(module) and all(buffer.device.type == "cpu" for buffer in module.buffers()):
            del module.dequantize_weight  # the compiled method of this layer hides that of its class
            count += 1
    return count


class _EachOnce(logging.Filter):
    """Passes each message once."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._passed
        self._passed.add(message)
        return is_new


def warn_once_of_casts() -> None:
    """Let bitsandbytes log once that 8-bit layers cast their inputs, and not for each layer in each step."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    if not any(isinstance(entry, _EachOnce) for entry in logger.filters):
        logger.addFilter(_EachOnce())


def refuse_odd_widths(model: nn.Module) -> None:
    """Refuse 4-bit layers that bitsandbytes cannot compute on the CPU. Raises ModelLoadError naming one and its width.

    bitsandbytes quantises blocks of consecutive weights. If the width is no multiple of the block size, blocks span two
    rows, and its CPU kernel fails at the first product rather than when the model loads.
    """
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None and module.weight.device.type == "cpu" and module.in_features % state.blocksize:
            raise ModelLoadError(
                "bitsandbytes computes 4-bit layers on the CPU only for widths that are multiples of"
                f" {state.blocksize}, and {name} takes {module.in_features}; set option.quantize=bitsandbytes8"
            )


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and a scale per output; its activations are not rounded.

    bitsandbytes rounds activations to 8 bits as well, except in the columns where any row of the batch has an outlier.
    With it, the tokens of a request would depend on the rest of the batch, and on the CPU these columns make a step ten
    times slower.
    """

    def __init__(self, linear: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.SCB if linear.weight.SCB is not None else linear.state.SCB
        self.register_buffer("weight", linear.weight.data)
        self.register_buffer("scales", (scales / 127).to(dtype))
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.reshape(-1, self.in_features)
        is_small = hidden.dtype == torch.bfloat16 and rows.shape[0] <= _INT8_KERNEL_ROWS
        if is_small and probes.multiplies_int8_weights():
            out = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)  # widens weights on the fly
        else:
            out = nn.functional.linear(rows, self.weight.to(hidden.dtype)).mul_(self.scales)
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)
