"""The kernels' attention of a chunk against torch's own operators."""

from __future__ import annotations

import pytest
import torch

from handlers.rolling_batch.attention import _KernelAttention, _Settings, _TorchAttention
from handlers.rolling_batch.kv_cache import KVCache, LayerShape


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 200), (37, 64), (300, 65), (5, 3)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (50, 0.0), (0, 4.0), (17, 4.0)])
def test_a_chunk_attends_to_what_it_may_see(
    dtype: torch.dtype, error: float, start: int, rows: int, window: int, softcap: float
) -> None:
    chance = torch.Generator().manual_seed(1)
    end = start + rows
    query = torch.randn((6, rows, 16), generator=chance).to(dtype)
    cache = KVCache([LayerShape(2, 16, 24)], 2, end, dtype, torch.device("cpu"))
    for area in (*cache.keys, *cache.values):
        area[1, :, :end] = torch.randn((2, end, area.shape[3]), generator=chance).to(dtype)
    settings = _Settings(0.3, window, softcap)
    begin = max(0, start + 1 - window) if window else 0
    keys, values = cache.keys[0][1][:, begin:end], cache.values[0][1][:, begin:end]
    found, expected = query.new_zeros((rows, 6, 24)), torch.zeros((rows, 6, 24))
    _KernelAttention(cache).attend_chunk(query, keys, values, found, start, begin, settings)
    _TorchAttention(cache).attend_chunk(query.float(), keys.float(), values.float(), expected, start, begin, settings)
    assert float((found.float() - expected).norm() / expected.norm()) < error
