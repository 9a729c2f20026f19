"""The row kernels of the CPU, on tensors."""

from __future__ import annotations

import torch

from handlers.cpu_kernels import rows as kernels
from handlers.cpu_kernels.arrays import as_numpy


class CpuRowKernels:
    """The project's compiled kernels; see RowKernels."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out = torch.empty_like(rows)
        kernels.rms_norm(as_numpy(rows), as_numpy(weight.detach()), epsilon, as_numpy(out))
        return out

    def add_and_norm(
        self, rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = rows + added
        return summed, self.rms_norm(summed, weight, epsilon)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
        kernels.silu_and_mul(as_numpy(gate_up), as_numpy(out))
        return out

    def rotate(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, heads: int) -> None:
        kernels.rotate(as_numpy(rows), as_numpy(cosines), as_numpy(sines), heads)
