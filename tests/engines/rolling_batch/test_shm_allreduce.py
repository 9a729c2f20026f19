"""All-reduce and gather through shared memory: correct, and the sums have the same bits on every rank."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch

from handlers.ranks.shm_allreduce import ShmAllReduce
from lmi_server.contract.ranks import Rank

pytestmark = pytest.mark.slow  # each rank imports torch

# Small shapes, one that fills a block, one of several blocks, then small ones again: a rank that reads a block too late
# would find the next one.
SHAPES = [(1, 1, 3), (1, 32, 512), (1, 128, 512), (1, 700, 512), *[(1, 1, 8)] * 200]


SIZES = (2, 3)


class Group:
    """Processes of which each is a rank: a rank waits for the others, so that none gets two."""

    def __init__(self, pool: ProcessPoolExecutor, size: int) -> None:
        self.pool, self.size = pool, size

    def run(self, call: Callable[[Rank], list[torch.Tensor]], directory: Path) -> list[list[torch.Tensor]]:
        """Return what `call` returns on each rank."""
        ranks = [Rank(rank, self.size, str(directory)) for rank in range(self.size)]
        return list(self.pool.map(call, ranks))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Start a process for each rank of the largest group, once this one has compiled the kernels for all of them.

    They are forks of a process that has imported torch.
    """
    directory, context = tmp_path_factory.mktemp("alone"), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["handlers.ranks.shm_allreduce"])
    use_kernels(directory)
    every_rank = context.Barrier(max(SIZES))
    with ProcessPoolExecutor(max(SIZES), context, meet, (directory, every_rank)) as pool:
        assert list(pool.map(abs, range(max(SIZES)))) == list(range(max(SIZES)))
        yield pool


def use_kernels(directory: Path) -> None:
    """Load the kernels, as a rank without others."""
    alone = Rank(0, 1, str(directory))
    all_reduce(alone)
    join(alone)


def meet(directory: Path, every_rank: Barrier) -> None:
    """Be ready for the first sum before a rank waits for it: a rank that waits leaves no core idle."""
    own = directory / str(os.getpid())
    own.mkdir()
    use_kernels(own)
    every_rank.wait()


@pytest.fixture(params=SIZES)
def group(request: pytest.FixtureRequest, pool: ProcessPoolExecutor) -> Group:
    return Group(pool, request.param)


def tensors(shapes: list[tuple[int, ...]], rank: int) -> list[torch.Tensor]:
    """Return what a rank contributes: float32 and bfloat16 in turns."""
    generator = torch.Generator().manual_seed(rank)
    types = (torch.float32, torch.bfloat16)
    return [torch.randn(shape, generator=generator).to(types[index % 2]) for index, shape in enumerate(shapes)]


def parts(rank: int) -> list[torch.Tensor]:
    return tensors(SHAPES, rank)


def all_reduce(rank: Rank) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    sums = ShmAllReduce(rank)
    return [sums.all_reduce(part) for part in parts(rank.rank)]


def test_every_rank_gets_the_sum_of_all(group: Group, tmp_path: Path) -> None:
    totals = group.run(all_reduce, tmp_path)
    for index, summands in enumerate(zip(*map(parts, range(group.size)), strict=True)):
        expected = torch.stack([summand.float() for summand in summands]).sum(0).to(summands[0].dtype)
        for total in totals:
            torch.testing.assert_close(total[index], expected)
            assert torch.equal(total[index], totals[0][index])


WIDE = [(1, 1, 7), (1, 64, 2000), (3, 2, 33), (1, 2, 70_000), (1, 0, 5), *[(1, 5, 16)] * 100]


def columns(rank: int) -> list[torch.Tensor]:
    return tensors(WIDE, rank)


def join(rank: Rank) -> list[torch.Tensor]:
    """Gather columns, with a sum after each."""
    torch.set_num_threads(1)
    sums = ShmAllReduce(rank)
    joined = []
    for part in columns(rank.rank):
        joined.append(sums.gather_columns(part))
        assert sums.all_reduce(torch.ones(3)).tolist() == [rank.size] * 3
    return joined


def test_rank_0_gets_the_columns_of_all_beside_each_other(group: Group, tmp_path: Path) -> None:
    joined = group.run(join, tmp_path)
    for index, parts_of_all in enumerate(zip(*map(columns, range(group.size)), strict=True)):
        assert torch.equal(joined[0][index], torch.cat(parts_of_all, dim=-1))


def test_parts_that_are_not_contiguous(tmp_path: Path) -> None:
    part = torch.arange(12.0).view(3, 4).T
    assert torch.equal(ShmAllReduce(Rank(0, 1, str(tmp_path))).all_reduce(part), part)
