"""Sums over ranks through shared memory: right, and the same bits on every rank."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from handlers.rolling_batch.shared_sums import SharedSums
from lmi_server.ranks import Rank

# Small ones, one that fills a piece, one of several pieces; small ones again, so that no piece is read too late.
SHAPES = [(1, 1, 3), (1, 32, 512), (1, 128, 512), (1, 700, 512), *[(1, 1, 8)] * 200]


def parts(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    types = (torch.float32, torch.bfloat16)
    return [torch.randn(shape, generator=generator).to(types[index % 2]) for index, shape in enumerate(SHAPES)]


def add_up(rank: Rank) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    sums = SharedSums(rank)
    return [sums.add_up(part) for part in parts(rank.rank)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_sum_of_all(ranks: int, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        totals = pool.map(add_up, [Rank(rank, ranks, str(tmp_path)) for rank in range(ranks)], chunksize=1)
    for index, summands in enumerate(zip(*map(parts, range(ranks)), strict=True)):
        expected = torch.stack([summand.float() for summand in summands]).sum(0).to(summands[0].dtype)
        for total in totals:
            torch.testing.assert_close(total[index], expected)
            assert torch.equal(total[index], totals[0][index])


def test_parts_that_are_not_contiguous(tmp_path: Path) -> None:
    part = torch.arange(12.0).view(3, 4).T
    assert torch.equal(SharedSums(Rank(0, 1, str(tmp_path))).add_up(part), part)
