"""Linear layers with weights in 8-bit floats (E4M3) and a scale per output; a GPU's tensor cores multiply such."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from handlers.checkpoints.placement import main_device
from handlers.checkpoints.quantization import weight_details
from lmi_server.contract.errors import ModelLoadError

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of E4M3
_MIN_SCALE = 1e-12
_WIDTH_STEP = 16  # of inputs and outputs
_MIN_CAPABILITY = (8, 9)
# Up to so many rows cuBLAS's product without scales and a kernel that applies them are faster than the product of torch
# that has scales of rows and outputs: on an H200 26 and 43 microseconds for 64 rows of 14,336 inputs, 4,096 outputs.
_FEW_ROWS = 256


class Fp8Linear(nn.Module):
    """A linear layer that rounds its input to 8 bits as well, row by row, with a scale for each row.

    `weight` is (out, in) E4M3, `scales` (out,) float32, `bias` (out,) of type `dtype` or None.
    """

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    @classmethod
    def quantize(cls, linear: nn.Linear) -> Fp8Linear:
        """Return the 8-bit form of `linear`."""
        weight = linear.weight.detach()
        scales = _scales(weight)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls((weight.float() / scales).to(FP8), scales[:, 0], bias, weight.dtype)

    @classmethod
    def join(cls, linears: Sequence[Fp8Linear], bias: torch.Tensor | None) -> Fp8Linear:
        """Return layers of one input as one, whose outputs are beside each other."""
        weight = torch.cat([linear.weight for linear in linears])
        return cls(weight, torch.cat([linear.scales for linear in linears]), bias, linears[0].dtype)

    @classmethod
    def is_joinable(cls, linears: Sequence[Fp8Linear]) -> bool:
        """Whether layers can be one: for one input."""
        return len({linear.in_features for linear in linears}) == 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        rows = hidden.reshape(-1, self.in_features)
        multiply = _product_on_gpu if rows.device.type == "cuda" else _product
        out = multiply(rows, self.weight, self.scales)
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)


def _product_on_gpu(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from handlers.checkpoints.fp8 import kernels

    rounded, row_scales = kernels.round_rows(rows.contiguous())
    if len(rows) > _FEW_ROWS:
        return torch._scaled_mm(
            rounded, weight.t(), scale_a=row_scales, scale_b=scales[None], out_dtype=rows.dtype, use_fast_accum=True
        )
    one = scales.new_ones(())
    products = torch._scaled_mm(
        rounded, weight.t(), scale_a=one, scale_b=one, out_dtype=rows.dtype, use_fast_accum=True
    )
    kernels.scale(products, row_scales, scales)
    return products


def _product(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the same without tensor cores, for tests without a GPU."""
    row_scales = _scales(rows)
    rounded = (rows.float() / row_scales).to(FP8).float()
    return ((rounded @ weight.float().T) * row_scales * scales).to(rows.dtype)


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """(rows, width) -> (rows, 1) float32: what 1 stands for in each row's 8-bit numbers."""
    return (rows.abs().amax(dim=1, keepdim=True).float() / _LARGEST).clamp_min(_MIN_SCALE)


def multiplies_float8(device: torch.device, widths: tuple[int, int]) -> bool:
    """Whether tensor cores of a device multiply 8-bit floats of such outputs and inputs."""
    is_able = device.type == "cuda" and torch.version.hip is None
    return (
        is_able
        and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
        and not any(width % _WIDTH_STEP for width in widths)
    )


def quantize_to_fp8(model: Any) -> dict[str, Any]:
    """Quantise the linear layers of `model` in place, but for its head; return details for the log.

    Raises ModelLoadError if the model is not on a GPU that multiplies 8-bit floats, or not in bfloat16.
    """
    device = main_device(model)
    if device.type != "cuda":
        raise ModelLoadError("option.quantize=fp8 is for models on a GPU; set option.quantize=q8_0 on the CPU")
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        raise ModelLoadError(
            "option.quantize=fp8 needs a GPU by NVIDIA of compute capability 8.9 or later; set"
            " option.quantize=bitsandbytes8"
        )
    if model.dtype != torch.bfloat16:
        raise ModelLoadError("option.quantize=fp8 is for models in bfloat16; set option.dtype=bf16")
    before = model.get_memory_footprint()
    replace_linears(model)
    return weight_details("fp8", model.get_memory_footprint(), before)


def replace_linears(model: Any) -> None:
    """Replace the linear layers by 8-bit ones, but for the head: no later layer evens out its errors."""
    head, left = model.get_output_embeddings(), 0
    kept = frozenset[Any]() if head is None else frozenset(head.modules())
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child in kept:
                continue
            if child.in_features % _WIDTH_STEP or child.out_features % _WIDTH_STEP:
                left += 1
                continue
            setattr(module, name, Fp8Linear.quantize(child))
    if left:
        logger.warning("option.quantize=fp8: %d linear layers keep their weights, whose widths are no multiples of %d",
                       left, _WIDTH_STEP)  # fmt: skip
