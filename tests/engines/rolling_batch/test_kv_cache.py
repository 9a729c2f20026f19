"""The KV cache's slots and the memory behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape, bytes_per_token

LAYERS = [LayerShape(2, 64, 64)] * 4
KIB_PER_TOKEN = bytes_per_token(LAYERS, torch.float32) // 1024


def cache(slots: int = 4, max_len: int = 4096) -> KVCache:
    return KVCache(LAYERS, slots, max_len, torch.float32)


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def fill(kv: KVCache, slot: int, tokens: int) -> None:
    for area in (*kv.keys, *kv.values):
        area[slot, :, :tokens] = 1.0


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert bytes_per_token([LayerShape(3, 64, 64)] * 30, torch.bfloat16) == 23040
    assert bytes_per_token([LayerShape(1, 8, 4), LayerShape(2, 8, 8)], torch.float32) == (12 + 32) * 4


def test_a_copy_gives_another_slot_the_first_tokens_and_touches_no_other() -> None:
    kv = cache(slots=3)
    for slot in range(3):
        kv.keys[1][slot, :, :10] = kv.values[3][slot, :, :10] = float(slot + 1)
    kv.copy(0, 2, 6)
    for area in (kv.keys[1], kv.values[3]):
        assert area[:, 0, :10, 0].tolist() == [[1.0] * 10, [2.0] * 10, [1.0] * 6 + [3.0] * 4]


def test_only_written_tokens_take_memory() -> None:
    before = resident_kib()
    kv = cache(slots=64, max_len=131072)
    fill(kv, 5, 512)
    grown = resident_kib() - before
    assert 512 * KIB_PER_TOKEN <= grown < 640 * KIB_PER_TOKEN


def test_a_trimmed_slot_gives_its_memory_back_and_keeps_its_first_tokens() -> None:
    kv = cache()
    fill(kv, 0, 4096)
    fill(kv, 1, 4096)
    before = resident_kib()
    kv.trim(0, 1000)
    assert (before - resident_kib()) / (3096 * KIB_PER_TOKEN) == pytest.approx(1, abs=0.05)
    assert kv.keys[2][0, :, :1000].unique().tolist() == [1.0]
    assert kv.keys[2][1, :, :4096].unique().tolist() == [1.0]


@pytest.mark.parametrize("dims", [(1, 80), (3, 64), (5, 24)])
def test_every_slot_starts_on_a_page_of_its_own(dims: tuple[int, int]) -> None:
    heads, dim = dims
    kv = KVCache([LayerShape(heads, dim, dim)], 3, 100, torch.bfloat16)
    assert kv.keys[0].shape[2] > 100
    assert kv.keys[0].stride(0) * 2 % 4096 == 0
