"""Probes of torch's private operators, which any version of torch may change or leave out.

Code that uses one asks here once in each process, and has another way to compute the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import nn

from lmi_server.contract.errors import describe

logger = logging.getLogger(__name__)

_ROWS, _INPUTS, _OUTPUTS = 3, 64, 32


@functools.cache
def packs_linears() -> bool:
    """Return whether oneDNN lays out bfloat16 weights in advance, and computes linear layers with them."""
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    if hasattr(operators, "_is_mkldnn_bf16_supported") and not operators._is_mkldnn_bf16_supported():
        return False
    rows, weight = _numbers(_ROWS), _numbers(_OUTPUTS)

    def compute() -> torch.Tensor:
        packed = operators._reorder_linear_weight(weight, _ROWS)
        return operators._linear_pointwise.default(rows, packed, None, "none", [], "")

    expected = nn.functional.linear(rows, weight)
    return _computes("mkldnn._linear_pointwise", "this project's kernels compute linear layers", compute, expected)


@functools.cache
def multiplies_int8_weights() -> bool:
    """Return whether torch multiplies bfloat16 rows by int8 weights with a scale for each output, on the CPU."""
    rows, weight, scales = _numbers(_ROWS), _integers(_OUTPUTS), _numbers(_OUTPUTS)[:, 0].contiguous()
    return _computes(
        "aten._weight_int8pack_mm",
        "8-bit weights are widened in every step",
        lambda: torch.ops.aten._weight_int8pack_mm(rows, weight, scales),
        nn.functional.linear(rows, weight.to(rows.dtype)) * scales,
    )


@functools.cache
def multiplies_integers() -> bool:
    """Return whether torch multiplies int8 by int8 into int32, on the CPU."""
    rows, weight = _integers(_ROWS), _integers(_OUTPUTS)
    return _computes(
        "_int_mm",
        "8-bit products are computed in double precision",
        lambda: torch._int_mm(rows, weight.t()),
        rows.double() @ weight.double().t(),
    )


def _numbers(rows: int) -> torch.Tensor:
    """(rows, _INPUTS) bfloat16, in [-1, 1]."""
    return (_integers(rows) / 8).to(torch.bfloat16)


def _integers(rows: int) -> torch.Tensor:
    """(rows, _INPUTS) int8, from -8 to 8, in no order that a transposed or reversed product would not show."""
    count = torch.arange(rows * _INPUTS, device="cpu").view(rows, _INPUTS)
    return (count * 7 % 17 - 8).to(torch.int8)


def _computes(name: str, instead: str, compute: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    """Return whether an operator computes what is expected, up to the rounding of bfloat16; log `instead` if not."""
    try:
        found = compute()
        if found.shape == expected.shape and torch.allclose(found.double(), expected.double(), rtol=0.02, atol=0.1):
            return True
        why = "computes something else"
    except (AttributeError, TypeError, RuntimeError) as error:  # its name, its arguments, this processor
        why = f"fails: {describe(error)}"
    logger.warning("torch %s: its operator %s %s; %s", torch.__version__, name, why, instead)
    return False
