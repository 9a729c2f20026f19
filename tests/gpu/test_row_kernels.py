"""The row kernels of a GPU compute what those of the CPU do.

They run on a GPU by NVIDIA, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from handlers.rolling_batch.fused.cpu_rows import CpuRowKernels
from handlers.rolling_batch.fused.row_kernels import RowKernels

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CPU = CpuRowKernels()
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def gpu() -> RowKernels:
    from handlers.rolling_batch.fused.gpu_rows import GpuRowKernels

    return GpuRowKernels()


def rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(width)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2 if found.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 576, 1024])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rms_norm(gpu: RowKernels, count: int, width: int, dtype: torch.dtype) -> None:
    given, weight = rows(count, width, dtype), rows(1, width, dtype)[0]
    close(gpu.rms_norm(given.to(DEVICE), weight.to(DEVICE), 1e-5), CPU.rms_norm(given, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 1536])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_silu_and_mul(gpu: RowKernels, count: int, width: int, dtype: torch.dtype) -> None:
    given = rows(count, 2 * width, dtype)
    close(gpu.silu_and_mul(given.to(DEVICE)), CPU.silu_and_mul(given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_rotate_turns_the_first_heads_and_leaves_the_others(gpu: RowKernels, dim: int, dtype: torch.dtype) -> None:
    given, angles = rows(3, 5 * dim, dtype), rows(3, dim // 2, torch.float32)
    cosines, sines = (torch.cat((part, part), 1).to(dtype) for part in (angles.cos(), angles.sin()))
    expected, found = given.clone(), given.to(DEVICE)
    CPU.rotate(expected, cosines, sines, 4)
    gpu.rotate(found, cosines.to(DEVICE), sines.to(DEVICE), 4)
    close(found, expected)
    assert torch.equal(found[:, 4 * dim :].cpu(), given[:, 4 * dim :])
