"""A RequestHandler in its worker, and the batches that the pool forms for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_servers import forked_workers
from relay_helpers import HANDLERS, on_loop, pool_settings

from lmi_server.contract.protocol import End, Error, Input, Load, Reply
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.supervisor.job import Job

FAULTS = "request_handlers:RequestFaults"


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HANDLERS)


@asynccontextmanager
async def pool_of(
    directory: Path, handler: str = FAULTS, batch_size: int = 1, workers: int = 1, **settings: Any
) -> AsyncIterator[WorkerPool]:
    load = Load("model", str(directory), handler, {"model_id": str(directory)}, ["model"], batch_size=batch_size)
    pool = WorkerPool(pool_settings(load, min_workers=workers, max_workers=workers, **settings))
    with forked_workers():
        pool.start()
        try:
            while len(pool.roster.ready) < workers and pool.availability.failure is None:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.001)
            yield pool
        finally:
            await pool.stop()


def submit(pool: WorkerPool, body: str) -> Job:
    return pool.submit(Input("invocations", {}, [("data", body.encode())]), on_overflow=lambda: None)


class Answer:
    """What a client sees of a job."""

    def __init__(self, status: int, data: bytes, error: str = "") -> None:
        self.status, self.data, self.error = status, data, error


async def answer(job: Job) -> Answer:
    data = b""
    while job.reply.terminal is None:
        await job.reply.wait()
        data += job.reply.take()
    data += job.reply.take()
    match job.reply.terminal:
        case Reply(_, status, _, body):
            return Answer(status, body)
        case End(_, status):
            return Answer(status, data)
        case Error(_, kind, _):
            return Answer(0, data, kind)


async def answers(pool: WorkerPool, *bodies: str) -> list[Answer]:
    jobs = [submit(pool, body) for body in bodies]
    return [await answer(job) for job in jobs]


@on_loop
async def test_a_request_is_answered(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        assert [found.data for found in await answers(pool, "a", "b")] == [b"1 a", b"1 b"]


@on_loop
async def test_a_full_batch_goes_at_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=4, max_batch_delay_s=60) as pool:
        found = await answers(pool, *"abcdefgh")
        assert [one.data for one in found] == [f"4 {letter}".encode() for letter in "abcdefgh"]


@on_loop
async def test_a_part_of_a_batch_goes_when_its_first_request_has_waited(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=4, max_batch_delay_s=0.2) as pool:
        before = time.monotonic()
        assert [one.data for one in await answers(pool, "a", "b")] == [b"2 a", b"2 b"]
        assert time.monotonic() - before >= 0.2


@on_loop
async def test_what_waits_for_a_batch_to_be_full_is_not_refused_for_its_wait(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=4, max_batch_delay_s=0.2, max_queue_delay_s=1e-9) as pool:
        assert [one.data for one in await answers(pool, "a")] == [b"1 a"]
        assert [one.data for one in await answers(pool, "b", "c")] == [b"2 b", b"2 c"]


@on_loop
async def test_a_batch_is_not_spread_over_workers(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=4, workers=2, max_batch_delay_s=60) as pool:
        held = [submit(pool, "wait go") for _ in range(4)]
        assert [one.data for one in await answers(pool, *"abcd")] == [f"4 {letter}".encode() for letter in "abcd"]
        (tmp_path / "go").touch()
        assert {(await answer(job)).data for job in held} == {b"4 wait go"}


@on_loop
async def test_a_request_that_waits_in_the_queue_is_cancelled_at_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        running = submit(pool, "wait go")
        waiting = submit(pool, "a")
        pool.dispatcher.cancel(waiting)
        assert (await answer(waiting)).error == "Cancelled"
        (tmp_path / "go").touch()
        assert (await answer(running)).status == 200


@on_loop
async def test_only_the_request_with_the_error_fails(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=3, max_batch_delay_s=60) as pool:
        found = await answers(pool, "a", "refuse", "b")
        assert [(one.status, b"refused" in one.data) for one in found] == [(200, False), (424, True), (200, False)]


@on_loop
async def test_what_is_raised_fails_the_batch_and_nothing_else(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=2, max_batch_delay_s=60) as pool:
        found = await answers(pool, "a", "raise", "b", "c")
        assert [one.status for one in found] == [424, 424, 200, 200]
        assert b"ValueError: no such thing" in found[0].data
        found = await answers(pool, "memory", "a")
        assert [one.status for one in found] == [507, 507]


@on_loop
async def test_a_batch_with_an_answer_too_few_fails(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "request_handlers:Short", batch_size=2, max_batch_delay_s=60) as pool:
        found = await answers(pool, "a", "b")
        assert [one.status for one in found] == [424, 424]
        assert b"the handler answered 1 of 2 requests" in found[0].data


@on_loop
async def test_a_stream_comes_in_pieces_and_ends_with_its_error(tmp_path: Path) -> None:
    async with pool_of(tmp_path, batch_size=3, max_batch_delay_s=60) as pool:
        whole, broken, refused = await answers(pool, "stream a b c", "stream a raise", "stream raise")
        assert (whole.status, whole.data) == (200, b"abc")
        assert (broken.error, broken.data) == ("HandlerError", b"a")
        assert refused.status == 424
        assert (tmp_path / "after").exists()


@on_loop
async def test_a_stream_ends_with_its_client(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        job = submit(pool, "stream forever")
        await job.reply.wait()
        pool.dispatcher.cancel(job)
        assert (await answers(pool, "a"))[0].data == b"1 a"
        assert (tmp_path / "after").exists()


@on_loop
async def test_what_a_dead_worker_had_begun_fails_and_the_rest_goes_to_the_next(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await answers(pool, *"a" * 50)  # fast, so that it gets requests ahead
        jobs = [submit(pool, body) for body in ("exit", "a", "b")]
        found = [await answer(job) for job in jobs]
        assert [one.error or one.data for one in found] == ["WorkerDiedError", b"1 a", b"1 b"]


@on_loop
async def test_what_waits_behind_a_slow_batch_goes_to_another_worker(tmp_path: Path) -> None:
    async with pool_of(tmp_path, workers=2) as pool:
        await answers(pool, *"a" * 100)
        bodies = ["a", "a", "wait go", *"abcdefgh"]
        jobs = [submit(pool, body) for body in bodies]
        others = [await answer(job) for job, body in zip(jobs, bodies, strict=True) if body != "wait go"]
        assert all(one.status == 200 for one in others)
        (tmp_path / "go").touch()
        assert (await answer(jobs[2])).status == 200


@pytest.mark.parametrize("how", ["sys.exit", "stream a exit", "stream exit"])
@on_loop
async def test_a_handler_may_end_its_process(tmp_path: Path, how: str) -> None:
    async with pool_of(tmp_path) as pool:
        found = (await answers(pool, how))[0]
        assert (found.error or found.status) in ("WorkerDiedError", 503)
        assert (await answers(pool, "a"))[0].data == b"1 a"


@on_loop
async def test_a_call_that_hangs_fails_after_predict_timeout(tmp_path: Path) -> None:
    async with pool_of(tmp_path, predict_timeout_s=0.5) as pool:
        await answers(pool, *"a" * 50)
        found = await answers(pool, "sleep 3600", "a")
        assert found[0].error == "PredictTimeoutError"
        assert found[1].data == b"1 a"


@on_loop
async def test_forks_and_signal_handlers_change_nothing(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        assert (await answers(pool, "fork"))[0].data == b"1 fork"
        assert (await answers(pool, "signals"))[0].data == b"1 signals"
        assert (await answers(pool, "a"))[0].data == b"1 a"


@pytest.mark.parametrize(
    ("handler", "reason"), [("RaisingAtStart", "not a model"), ("ExitingAtStart", "SystemExit(no weights)")]
)
@on_loop
async def test_a_load_that_fails_says_why(tmp_path: Path, handler: str, reason: str) -> None:
    async with pool_of(tmp_path, f"request_handlers:{handler}") as pool:
        assert pool.availability.status is ModelStatus.FAILED
        assert pool.availability.failure is not None
        assert reason in pool.availability.failure.message
