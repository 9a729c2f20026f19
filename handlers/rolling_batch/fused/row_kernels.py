"""The work of fused modules between their products, by the kernels of the weights' device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch


class RowKernels(Protocol):
    """Each computes in float32, and rounds where transformers' own code does. Rows are contiguous."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """(n, width) -> (n, width)."""

    def add_and_norm(
        self, rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `rows` + `added`, (n, width) each, and the norm of that."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(n, 2 * width), gates first -> (n, width)."""

    def rotate(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> None:
        """Rotate the first `heads` heads of rows (n, width) in place; cosines and sines are (n, dim)."""


def is_fusible(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether modules on the device and in the type can be fused."""
    if device.type == "cpu":
        return dtype in (torch.bfloat16, torch.float32)
    return device.type == "cuda" and find_spec("triton") is not None


def row_kernels(device: torch.device) -> RowKernels:
    """Return the kernels of a device that has them."""
    if device.type == "cpu":
        from handlers.rolling_batch.fused.cpu_rows import CpuRowKernels

        return CpuRowKernels()
    from handlers.rolling_batch.fused.gpu_rows import GpuRowKernels

    return GpuRowKernels()
