"""The kernel for one row computes what the linear layers and what lies between them do, and so does rotation.

They run on a GPU by NVIDIA, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from handlers.rolling_batch.fused.gpu_rows import GpuRowKernels
from handlers.rolling_batch.fused.one_row import multiply
from handlers.rolling_batch.pages import launch
from handlers.rolling_batch.pages.launch import PageLayer
from handlers.rolling_batch.pages.projection import rotate_and_write

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [(72, 40), (1040, 33)] if not ON_GPU else [(72, 40), (1040, 33), (4096, 1000)]
CHAINS = [False, True] if ON_GPU and torch.cuda.get_device_capability() >= (9, 0) else [False]


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.float() - expected).norm() / expected.norm())
    assert error < (0.02 if found.dtype == torch.bfloat16 else 1e-5), error


@pytest.fixture(params=CHAINS)
def run(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """Multiply, and once more behind a launch that may still run."""

    def both(*arguments: Any) -> torch.Tensor:
        first = multiply(*arguments, chained=request.param)
        second = multiply(*arguments, chained=request.param)
        assert torch.equal(first, second)
        return first

    return both


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), WIDTHS)
@pytest.mark.parametrize("kind", ["plain", "normed", "added", "gated"])
def test_a_row_is_multiplied(run: Any, dtype: torch.dtype, width: int, outputs: int, kind: str) -> None:
    linear = nn.Linear(width, 2 * outputs if kind == "gated" else outputs, bias=kind != "plain")
    linear.weight.data = made(dtype, *linear.weight.shape) / width**0.5
    if linear.bias is not None:
        linear.bias.data = made(dtype, len(linear.weight))
    linear.requires_grad_(False)
    rows = made(dtype, 1, width)
    norm = SimpleNamespace(weight=made(dtype, width).abs() + 0.1, epsilon=1e-5) if kind in ("normed", "gated") else None
    residual = made(dtype, 1, outputs) if kind == "added" else None
    exact = rows.double()
    if norm is not None:
        exact = exact * (exact.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight.double()
    expected = nn.functional.linear(
        exact, *(None if part is None else part.double() for part in (linear.weight, linear.bias))
    )
    if kind == "gated":
        gate, other = expected.chunk(2, -1)
        expected = nn.functional.silu(gate) * other
    if residual is not None:
        expected = expected + residual.double()
    close(run(rows, linear, norm, kind == "gated", residual), expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_rotated_keys_and_values_are_in_their_pages(dim: int, dtype: torch.dtype) -> None:
    layer = PageLayer(3, 2, dim, dim, 16)
    heads = layer.heads + 2 * layer.kv_heads
    projected, angles = made(dtype, 5, heads * dim), made(torch.float32, 5, dim // 2)
    cosines, sines = (torch.cat((part, part), 1).to(dtype) for part in (angles.cos(), angles.sin()))
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    slots, positions = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([0, 1, 1, 0, 1], [0, 15, 16, 17, 3])
    )
    found, wanted = (
        [torch.full((4, layer.kv_heads, 16, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
        for _ in range(2)
    )
    expected = projected.clone()
    GpuRowKernels().rotate(expected, cosines, sines, layer.heads + layer.kv_heads)
    states = expected.view(5, heads, dim)
    key, value = states[:, layer.heads : layer.heads + layer.kv_heads], states[:, layer.heads + layer.kv_heads :]
    launch.write(key, value, *wanted, tables, slots, positions, layer)
    rotate_and_write(projected, cosines, sines, *found, tables, slots, positions, layer)
    assert torch.equal(projected, expected)
    for pages, others in zip(found, wanted, strict=True):
        torch.testing.assert_close(pages, others, rtol=0, atol=0, equal_nan=True)
