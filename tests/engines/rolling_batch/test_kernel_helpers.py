"""Helper threads share out the regions of a kernel, whoever else calls kernels meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from rolling_batch_helpers import Engine, prompts
from tiny_models import tiny_model

from handlers.cpu_kernels.compilation.decorators import kernel_part
from handlers.cpu_kernels.threads import helpers
from handlers.cpu_kernels.threads.parallel import in_threads, shares_of
from handlers.rolling_batch.cpu import pass_threads

pytestmark = pytest.mark.skipif(not helpers.MACHINE_IS_KNOWN, reason="there are no helpers on this kind of processor")


@kernel_part()
def _count(first: int, last: int, visits: np.ndarray) -> None:
    for place in range(first, last):
        visits[place] += 1


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _count_all(visits: np.ndarray, rounds: int) -> None:
    for _ in range(rounds):
        in_threads(_count, len(visits), (visits,))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _shares(threads: int) -> int:
    found: int = shares_of(threads)
    return found


@pytest.fixture(params=[2, 3, 9])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let helpers compute, some of them more than this machine has cores; end them after the test."""
    helpers.stop()
    assert helpers.start(request.param)
    helpers.use(True)
    yield request.param
    helpers.stop()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 1000])
def test_each_number_is_computed_once(threads: int, count: int) -> None:
    visits = np.zeros(count, np.int64)
    _count_all(visits, 500)
    assert visits.tolist() == [500] * count


def test_there_are_more_shares_than_threads_so_that_one_that_is_late_leaves_some(threads: int) -> None:
    assert _shares(threads) > threads
    helpers.use(False)
    assert _shares(threads) == threads


def test_several_threads_may_call_kernels_at_once(threads: int) -> None:
    counted = [np.zeros(64, np.int64) for _ in range(4)]
    callers = [threading.Thread(target=_count_all, args=(visits, 2000)) for visits in counted]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((visits == 2000).all() for visits in counted)


def test_kernels_run_while_helpers_are_used_and_not_used_in_turns(threads: int) -> None:
    visits = np.zeros(64, np.int64)
    caller = threading.Thread(target=_count_all, args=(visits, 5000))
    caller.start()
    while caller.is_alive():
        helpers.use(not helpers.are_used())
    caller.join()
    assert (visits == 5000).all()


def test_kernels_run_while_helpers_end_and_start_again(threads: int) -> None:
    visits = np.zeros(64, np.int64)
    caller = threading.Thread(target=_count_all, args=(visits, 20000), daemon=True)
    caller.start()
    while caller.is_alive():
        helpers.stop()
        assert helpers.start(threads)
        helpers.use(True)
    assert (visits == 20000).all()


def test_helpers_without_work_sleep(threads: int) -> None:
    _count_all(np.zeros(64, np.int64), 10)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25


def test_helpers_that_ended_can_start_again(threads: int) -> None:
    alive = threading.active_count()
    helpers.stop()
    assert threading.active_count() == alive - (threads - 1)
    assert not helpers.are_used()
    assert helpers.start(threads)
    helpers.use(True)
    visits = np.zeros(64, np.int64)
    _count_all(visits, 100)
    assert (visits == 100).all()


@pytest.mark.parametrize("threads_wanted", [0, 1, helpers.MAX_THREADS + 1])
def test_one_thread_and_very_many_have_no_helpers(threads_wanted: int) -> None:
    helpers.stop()
    assert not helpers.start(threads_wanted)
    helpers.use(True)
    assert not helpers.are_used()


_FORKED = """
import os, numpy as np
from handlers.cpu_kernels.threads import helpers
from handlers.cpu_kernels.rows import rms_norm

def normed():
    rows = np.full((50, 4), 2, np.float32)
    rms_norm(rows, np.ones(4, np.float32), 0.0, rows)
    return (rows == 1).all()

assert helpers.start(2)
helpers.use(True)
assert normed()
child = os.fork()
if child == 0:
    ok = not helpers.are_used() and helpers.threads() == 1 and helpers.start(3)
    helpers.use(True)
    os._exit(0 if ok and normed() else 1)
assert os.waitpid(child, 0)[1] == 0
assert normed()
print(sum(rms_norm.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_forked_process_has_helpers_of_its_own_and_a_kernel_from_disk_finds_them(tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", _FORKED]
    found = [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
        for _ in range(2)
    ]
    assert found == ["0\n", "1\n"]


@pytest.fixture
def torch_threads() -> Iterator[int]:
    """Give torch two threads; restore its number, and end helpers, after the test."""
    former = torch.get_num_threads()
    helpers.stop()
    torch.set_num_threads(2)
    yield 2
    helpers.stop()
    torch.set_num_threads(former)


def test_a_pass_is_computed_by_one_kind_of_threads(torch_threads: int) -> None:
    assert pass_threads.start_helpers()
    for only_kernels in (True, True, False, True):
        pass_threads.begin_pass(only_kernels)
        assert helpers.are_used() == only_kernels
        assert torch.get_num_threads() == (1 if only_kernels else torch_threads)
    assert pass_threads.start_helpers()  # of another model: as many as before
    assert helpers.threads() == torch_threads


@pytest.mark.slow
def test_an_engine_answers_with_helpers_as_without(torch_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    monkeypatch.setattr(
        "handlers.rolling_batch.runner.flat_passes.begin_pass",
        lambda only: (used.append(only), pass_threads.begin_pass(only)),
    )

    def answers(with_helpers: bool) -> list[list[int]]:
        engine = Engine(tiny_model("llama", torch.bfloat16), chunk=128)
        assert engine.runner._eager.decoder is not None
        engine.runner._eager.unpadded_rows = 8  # as if oneDNN were faster with more
        if with_helpers:
            assert engine.runner.use_helpers()
        asked = [engine.add(prompt, max_new_tokens=9, ignore_eos=True)[1] for prompt in prompts(9)]
        engine.run()
        return [answer.tokens for answer in asked]

    alone = answers(with_helpers=False)
    assert not used
    assert answers(with_helpers=True) == alone
    assert set(used) == {True, False}  # passes of few rows, and those with prompts
