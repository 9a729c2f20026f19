"""Attention of prompts by FlashInfer: what it is told of pages and chunks, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from handlers.rolling_batch.attention.kv_cache import LayerShape
from handlers.rolling_batch.attention.rows import ChunkRows, StepRows
from handlers.rolling_batch.attention.terms import AttentionTerms
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.flashinfer_prompts import MIN_ROWS, FlashInferPrompts
from handlers.rolling_batch.pages.launch import PageLayer
from handlers.rolling_batch.pages.rows import PageRows
from handlers.rolling_batch.pages.torch_pages import TorchPages
from handlers.rolling_batch.pages.triton_pages import fastest
from handlers.rolling_batch.schedule.page_table import PagesAdded, PageStep

PAGE, HEADS, KV_HEADS, DIM = 8, 4, 2, 16
SHAPE = PageLayer(HEADS, KV_HEADS, DIM, DIM, PAGE)


class FakeFlashInfer:
    """Stands for the package: plans and attends as its documentation says, by torch's operators."""

    def __init__(self) -> None:
        self.plans = 0
        self.BatchPrefillWithPagedKVCacheWrapper = lambda workspace, layout: FakeWrapper(self, layout)


class FakeWrapper:
    def __init__(self, library: FakeFlashInfer, layout: str) -> None:
        assert layout == "HND"  # pages are (kv_heads, page, dim)
        self._library = library

    def plan(self, rows: Any, begins: Any, pages: Any, last: Any, *shape: int, **more: Any) -> None:
        assert shape == (HEADS, KV_HEADS, DIM, PAGE)
        assert more["causal"]
        assert more["q_data_type"] == more["kv_data_type"] == torch.float32
        self._library.plans += 1
        self._planned = (rows.tolist(), begins.tolist(), pages.long(), last.tolist(), more)

    def run(self, query: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        rows, begins, pages, last, more = self._planned
        for number in range(len(last)):
            own = query[rows[number] : rows[number + 1]]
            listed = pages[begins[number] : begins[number + 1]]
            length = (len(listed) - 1) * PAGE + last[number]
            keys, values = (
                part[listed].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(HEADS // KV_HEADS, 0)
                for part in kept
            )
            scores = torch.einsum("rhd,hnd->hrn", own, keys) * more["sm_scale"]
            cap = more["logits_soft_cap"]
            scores = cap * torch.tanh(scores / cap) if cap else scores
            place = torch.arange(length - len(own), length)[:, None]
            seen = torch.arange(length) <= place
            if more["window_left"] >= 0:
                seen &= torch.arange(length) >= place - more["window_left"]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[rows[number] : rows[number + 1]] = torch.einsum("hrn,hnd->rhd", weights, values)
        return out


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (11, 0.0), (0, 3.0)])
def test_chunks_attend_to_their_own_pages(window: int, softcap: float) -> None:
    torch.manual_seed(0)
    cache = PagedCache([LayerShape(KV_HEADS, DIM, DIM)] * 2, 3, 64, 24 * PAGE, PAGE, torch.float32)
    order = torch.randperm(24).tolist()
    cache.apply(PageStep([PagesAdded(slot, 0, order[8 * slot : 8 * slot + 8]) for slot in range(3)]))
    for area in (*cache.keys, *cache.values):
        area.normal_()
    chunks = [ChunkRows(1, 0, 40, 1, 41, 1), ChunkRows(2, 13, 60, 41, 88, 2)]
    rows = PageRows.from_step(StepRows(np.array([0]), np.array([20]), chunks), torch.device("cpu"))
    terms, shape = AttentionTerms(0.3, window, softcap=softcap), replace(SHAPE, window=window, softcap=softcap)
    library = FakeFlashInfer()
    prompts = FlashInferPrompts(cache, library)
    for layer in range(2):
        query, key, value = (torch.randn(heads, 88, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        expected, out = torch.empty(88, HEADS, DIM), torch.full((88, HEADS, DIM), torch.nan)
        TorchPages(cache).attend(layer, query, key, value, rows, expected, terms)
        prompts.attend(query.transpose(0, 1), layer, rows, terms, shape, out)
        assert out[0].isnan().all()
        torch.testing.assert_close(out[1:], expected[1:])
    assert library.plans == 1


def of_chunks(*lengths: int) -> PageRows:
    chunks, first = [], 0
    for slot, length in enumerate(lengths):
        chunks.append(ChunkRows(slot, 0, length, first, first + length, slot))
        first += length
    none = np.empty(0, np.int64)
    return PageRows.from_step(StepRows(none, none, chunks), torch.device("cpu"))


def test_it_takes_long_chunks_of_common_shapes() -> None:
    prompts: Any = FlashInferPrompts(PagedCache([], 1, 64, 64, PAGE, torch.float32), FakeFlashInfer())
    llama = PageLayer(32, 8, 128, 128, 32)
    plain, long = AttentionTerms(0.1), of_chunks(MIN_ROWS, MIN_ROWS + 5)
    assert prompts.takes(llama, plain, torch.bfloat16, long)
    assert not prompts.takes(llama, plain, torch.float32, long)
    assert not prompts.takes(llama, plain, torch.bfloat16, of_chunks(MIN_ROWS, 9))
    assert not prompts.takes(replace(llama, dim=96, value_dim=96), plain, torch.bfloat16, long)
    assert not prompts.takes(llama, AttentionTerms(0.1, sinks=torch.zeros(32)), torch.bfloat16, long)
    assert not prompts.takes(llama, plain, torch.bfloat16, replace(long, ends=long.positions))
    assert not prompts.takes(llama, plain, torch.bfloat16, replace(long, described=()))  # of a recorded pass


def test_the_fastest_way_that_computes_the_same_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    out = torch.zeros(4)
    took = {"first": 3.0, "slow": 5.0, "wrong": 1.0, "fast": 2.0}

    def writing(name: str, value: float) -> Callable[[], None]:
        def run() -> None:
            out.fill_(value)
            times.append(took[name])

        return run

    def failing() -> None:
        raise RuntimeError("no kernel")

    times: list[float] = []

    def seconds(run: Callable[[], None]) -> float:
        run()
        return times[-1]

    ways = {"first": writing("first", 1.0), "slow": writing("slow", 1.001), "failing": failing}
    assert fastest(ways, out, seconds) == "first"
    assert fastest({**ways, "wrong": writing("wrong", 1.3), "fast": writing("fast", 0.995)}, out, seconds) == "fast"
    assert "attention of prompts not by wrong: it computes something else" in caplog.text
    with pytest.raises(RuntimeError, match="no kernel"):
        fastest({"first": failing}, out, seconds)
