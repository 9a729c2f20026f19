"""The kernels' attention of chunks and of decode rows against torch's own operators."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from handlers.cpu_kernels.arguments import SeenColumns, SlotSpan
from handlers.cpu_kernels.attention import decoding as kernels
from handlers.cpu_kernels.compilation.decorators import SOURCES, sources_digest
from handlers.rolling_batch.attention.kernel_attention import KernelAttention
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.attention.rows import ChunkRows, StepRows
from handlers.rolling_batch.attention.slot_attention import SlotAttention
from handlers.rolling_batch.attention.terms import AttentionTerms, States
from handlers.rolling_batch.attention.torch_attention import TorchAttention


def _sinks(heads: int) -> torch.Tensor:
    return torch.linspace(-3, 6, heads)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 200), (37, 64), (300, 65), (5, 3), (5000, 70)])
@pytest.mark.parametrize(
    ("window", "softcap", "chunk", "sinks"),
    [
        (0, 0.0, 0, False),
        (50, 0.0, 0, True),
        (0, 4.0, 0, True),
        (17, 4.0, 0, False),
        (3000, 0.0, 32, False),
        (0, 0.0, 40, True),
    ],
)
@pytest.mark.parametrize("shape", [LayerShape(2, 16, 24), LayerShape(6, 80, 80), LayerShape(1, 33, 129)])
def test_a_chunk_attends_to_what_it_may_see(
    dtype: torch.dtype,
    error: float,
    start: int,
    rows: int,
    window: int,
    softcap: float,
    chunk: int,
    sinks: bool,
    shape: LayerShape,
) -> None:
    chance = torch.Generator().manual_seed(1)
    end = start + rows
    query = torch.randn((6, rows, shape.head_dim), generator=chance).to(dtype)
    cache = KVCache([shape], 2, end, dtype)
    for area in (*cache.keys, *cache.values):
        area[1, :, :end] = torch.randn(area[1, :, :end].shape, generator=chance).to(dtype)
    terms = AttentionTerms(0.3, window, chunk, softcap, _sinks(6) if sinks else None)
    columns = SeenColumns.from_lengths([rows], start, window, chunk)
    states, span = States(query, cache.keys[0], cache.values[0]), SlotSpan(1, columns.begin, end)
    exact = States(*(part.float() for part in states))
    found, expected = (torch.zeros((rows, 6, shape.value_dim), dtype=kind) for kind in (dtype, torch.float32))
    KernelAttention(cache).attend_chunk(states, span, found, columns, terms)
    TorchAttention(cache).attend_chunk(exact, span, expected, columns, terms)
    assert float((found.float() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize(
    ("window", "softcap", "chunk", "sinks"),
    [(0, 0.0, 0, False), (20, 0.0, 0, True), (3, 4.0, 0, False), (0, 4.0, 16, True), (30, 0.0, 48, True)],
)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7])  # that share keys and values
@pytest.mark.parametrize("dims", [(64, 64), (80, 33), (16, 144), (128, 16)])
def test_rows_attend_to_their_slots_whatever_their_lengths_are(
    dtype: torch.dtype,
    error: float,
    window: int,
    softcap: float,
    chunk: int,
    sinks: bool,
    heads: int,
    dims: tuple[int, int],
) -> None:
    """The kernel takes tokens in blocks, heads in groups and columns in vectors; none of these sizes divides all."""
    chance = torch.Generator().manual_seed(1)
    positions = np.array([0, 5, 15, 16, 17, 63, 64, 100, 31])
    slots = np.arange(len(positions))[::-1].copy()
    cache = KVCache([LayerShape(2, *dims)], len(slots), 101, dtype)
    for area in (*cache.keys, *cache.values):
        area[:] = torch.randn(area.shape, generator=chance).to(dtype)
        for slot, position in zip(slots, positions, strict=True):
            area[slot, :, position + 1 :] = torch.nan  # what no row may see
    query, key, value = (
        torch.randn((count, len(slots), dim), generator=chance).to(dtype)
        for count, dim in ((2 * heads, dims[0]), (2, dims[0]), (2, dims[1]))
    )
    found = torch.zeros((len(slots), 2 * heads, dims[1]), dtype=dtype)
    terms = AttentionTerms(0.3, window, chunk, softcap, _sinks(2 * heads) if sinks else None)
    rows = StepRows(slots, positions, [])
    KernelAttention(cache).attend_single(0, States(query, key, value), rows, found, terms)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        begin = max(position + 1 - window if window else 0, position // chunk * chunk if chunk else 0, 0)
        keys, values = (area[0][slot, :, begin : position + 1].double() for area in (cache.keys, cache.values))
        assert torch.equal(keys[:, -1], key[:, row].double())
        scores = torch.einsum("ghd,gtd->ght", query[:, row].double().view(2, heads, -1), keys) * 0.3
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if sinks:
            scores = torch.cat((scores, _sinks(2 * heads).double().view(2, heads, 1)), -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        expected = torch.einsum("ght,gtd->ghd", weights, values).flatten(0, 1)
        assert float((found[row].double() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 0.01)])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (60, 0), (17, 0), (5, 0), (0, 64), (30, 16)])
def test_chunks_that_share_tokens_of_another_slot_attend_as_if_these_were_their_own(
    dtype: torch.dtype, error: float, window: int, chunk: int
) -> None:
    chance = torch.Generator().manual_seed(2)
    start, lengths = 50, [70, 1, 150, 16]
    cache = KVCache([LayerShape(2, 16, 24)], 5, 256, dtype)
    for area in (*cache.keys, *cache.values):
        area[:, :, :start] = torch.randn((2, start, area.shape[3]), generator=chance).to(dtype)
    rows = sum(lengths)
    query, key, value = (
        torch.randn((1, heads, rows, dim), generator=chance).to(dtype) for heads, dim in ((6, 16), (2, 16), (2, 24))
    )
    attention = SlotAttention(cache, "chunks_of_a_test", [AttentionTerms(0.3, window, chunk)])

    def attended(source_of: dict[int, int]) -> torch.Tensor:
        ends = np.cumsum(lengths)
        chunks = [
            ChunkRows(slot, start, start + length, int(end) - length, int(end), source_of.get(slot, slot))
            for slot, length, end in zip((1, 2, 3, 4), lengths, ends, strict=True)
        ]
        attention.begin(StepRows(np.empty(0, np.int64), np.empty(0, np.int64), chunks))
        module = SimpleNamespace(layer_idx=0)
        return attention(module, query, key, value)[0].float()

    shared = attended({1: 0, 2: 0, 3: 0, 4: 0})
    for slot in (1, 2, 3, 4):
        cache.copy(0, slot, start)
    expected = attended({})
    assert float((shared - expected).norm() / expected.norm()) < error
    # What one sequence computes that is not finite leaves the others as they are.
    key[:, :, 70], value[:, :, 70] = float("nan"), float("inf")
    spoilt = attended({1: 0, 2: 0, 3: 0, 4: 0})
    others = torch.arange(rows) != 70
    assert torch.equal(spoilt[0, others], shared[0, others])


def test_compiled_code_is_looked_up_by_all_sources_of_the_kernels(tmp_path: Path) -> None:
    assert kernels.slot_attention.py_func.__qualname__.startswith(f"slot_attention_{SOURCES}_")
    folder = shutil.copytree(Path(kernels.__file__).parent.parent, tmp_path / "cpu_kernels")
    assert sources_digest(folder) == SOURCES
    with (folder / "intrinsics.py").open("a") as intrinsics:
        intrinsics.write("# changed\n")
    assert sources_digest(folder) != SOURCES
