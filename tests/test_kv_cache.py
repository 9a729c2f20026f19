"""The KV cache's slots and the memory behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from handlers.rolling_batch.kv_cache import KVCache, LayerShape, bytes_per_token

LAYERS = [LayerShape(2, 64, 64)] * 4
KIB_PER_TOKEN = bytes_per_token(LAYERS, torch.float32) // 1024


def cache(slots: int = 4, max_len: int = 4096, kv_tokens: int = 4096) -> KVCache:
    return KVCache(LAYERS, slots, max_len, kv_tokens, torch.float32, torch.device("cpu"))


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def fill(kv: KVCache, slot: int, tokens: int) -> None:
    for area in (*kv.keys, *kv.values):
        area[slot, :, :tokens] = 1.0


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert bytes_per_token([LayerShape(3, 64, 64)] * 30, torch.bfloat16) == 23040
    assert bytes_per_token([LayerShape(1, 8, 4), LayerShape(2, 8, 8)], torch.float32) == (12 + 32) * 4


def test_slots_are_separate_and_reused() -> None:
    kv = cache(slots=2)
    first, second = kv.acquire(10), kv.acquire(10)
    assert {first, second} == {0, 1}
    kv.keys[0][first, :, :10] = 1.0
    kv.keys[0][second, :, :10] = 2.0
    assert kv.keys[0][first, :, :10].unique().tolist() == [1.0]
    assert kv.used_slots == 2
    kv.release(first)
    assert kv.acquire(5) == first


def test_memory_is_taken_only_where_tokens_are_written() -> None:
    before = resident_kib()
    kv = cache(slots=64, max_len=131072, kv_tokens=64 * 131072)
    fill(kv, kv.acquire(512), 512)
    grown = resident_kib() - before
    assert 512 * KIB_PER_TOKEN <= grown < 640 * KIB_PER_TOKEN


def test_released_slots_give_their_memory_to_others() -> None:
    """Each round fills another slot near the limit; without giving back, four times the limit would be resident."""
    kv = cache(slots=4, kv_tokens=4096)
    before = resident_kib()
    filled = []
    for _ in range(4):
        slot = kv.acquire(4000)
        fill(kv, slot, 4000)
        filled.append(slot)
        kv.release(slot)
        assert kv.acquire(1) == slot  # a small sequence that stays, so that the next round gets another slot
        assert kv.resident_tokens <= 4096
    assert len(set(filled)) == 4
    assert resident_kib() - before < 1.25 * 4096 * KIB_PER_TOKEN


@pytest.mark.parametrize("dims", [(1, 80), (3, 64), (5, 24)])
def test_every_slot_starts_on_a_page_of_its_own(dims: tuple[int, int]) -> None:
    heads, dim = dims
    kv = KVCache([LayerShape(heads, dim, dim)], 3, 100, 300, torch.bfloat16, torch.device("cpu"))
    assert kv.max_len >= 100
    assert kv.keys[0].stride(0) * 2 % 4096 == 0
