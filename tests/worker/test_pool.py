from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_servers import forked_workers, parent_of_workers
from relay_helpers import FAULTS, HANDLERS, load_of, on_loop, pool_settings

from lmi_server.contract.errors import (
    BadParameterError,
    ModelMemoryError,
    ModelNotReadyError,
    QueueDelayError,
    QueueFullError,
)
from lmi_server.contract.protocol import End, Error, Input, Reply
from lmi_server.machine.devices import plan_devices
from lmi_server.serving.pool.membership import Membership
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.serving.pool_settings import ModelStatus
from lmi_server.supervisor.job import Deadline, Job
from lmi_server.supervisor.replicas import Backoff, CrashLoopDetector
from lmi_server.supervisor.worker_requests import WorkerRequests

WINDOW = "fault_handlers:WindowHandler"


@pytest.fixture(autouse=True)
def _fault_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers, which inherit this environment, import the fault handlers."""
    monkeypatch.setenv("PYTHONPATH", HANDLERS, prepend=os.pathsep)


@asynccontextmanager
async def pool_of(
    directory: Path, handler: str = FAULTS, options: dict[str, str] | None = None, spawned: bool = False, **changes: Any
) -> AsyncIterator[WorkerPool]:
    """Start a pool whose workers are forks, or `spawned` as those of users are."""
    pool = WorkerPool(pool_settings(load_of(directory, handler, options or {}), **changes))
    with contextlib.nullcontext() if spawned else forked_workers():
        pool.start()
        try:
            await pool.availability.settled.wait()
            yield pool
        finally:
            await pool.stop()


def submit(pool: WorkerPool, prompt: str, stream: bool = False, priority: int = 3, tokens: int = 3, **more: Any) -> Job:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}, "stream": stream}
    request = Input("invocations", {}, [("data", msgspec.json.encode(body))], priority=priority)
    return pool.submit(request, on_overflow=lambda: None, **more)


async def ended(job: Job) -> Reply | End | Error:
    while job.reply.terminal is None:
        await job.reply.wait()
        job.reply.take()
    return job.reply.terminal


async def started(job: Job) -> None:
    while job.reply.head is None:
        await job.reply.wait()


async def answer(job: Job) -> str:
    terminal = await ended(job)
    assert isinstance(terminal, Reply)
    return str(msgspec.json.decode(terminal.data).get("generated_text"))


def pids(pool: WorkerPool) -> list[int]:
    """Return the processes of the workers that have loaded the model."""
    workers = [worker for replicas in pool.replica_sets for worker in replicas.workers]
    return [worker.pid for worker in workers if worker.pid is not None]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; `on_loop` limits the wait."""
    while not condition():  # noqa: ASYNC110 - the pool has no event for every state that a test may look for
        await asyncio.sleep(0.001)


@on_loop
async def test_it_answers(tmp_path: Path) -> None:
    async with pool_of(tmp_path, spawned=True, min_workers=2, max_workers=2) as pool:
        assert await answer(submit(pool, "a b c")) == " a b c"
        job = submit(pool, "a b c", stream=True)
        await started(job)
        assert job.reply.head is not None
        assert job.reply.head.status == 200
        assert isinstance(await ended(job), End)
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (0, 0)


@on_loop
async def test_no_worker_holds_more_than_it_has_room_for(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=2, job_queue_size=3) as pool:
        jobs = [submit(pool, "wait") for _ in range(2)]
        waiting = [submit(pool, "a", priority=priority) for priority in (3, 1, 3)]
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (2, 3)
        with pytest.raises(QueueFullError, match="capacity exceeded"):
            submit(pool, "b")
        pool.dispatcher.cancel(jobs[0])
        assert pool.dispatcher.in_flight == 2, "the place is free only once the worker says so"
        for job in waiting:
            assert await answer(job) == " a a a"
        assert waiting[1].sent_at < waiting[0].sent_at < waiting[2].sent_at
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (1, 0)


@on_loop
async def test_keys_take_turns_and_the_one_with_most_requests_gives_way(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1, job_queue_size=4) as pool:
        running = submit(pool, "wait", tenant=b"a")
        flood = [submit(pool, "a", tenant=b"a") for _ in range(4)]
        with pytest.raises(QueueFullError, match="capacity exceeded"):
            submit(pool, "a", tenant=b"a")
        others = [submit(pool, "b", tenant=b"b") for _ in range(2)]
        with pytest.raises(QueueFullError, match="capacity exceeded"):
            submit(pool, "b", tenant=b"b")
        for job in flood[2:]:
            terminal = await ended(job)
            assert isinstance(terminal, Error)
            assert (terminal.kind, terminal.retry_after) == ("QueueFullError", 1)
        pool.dispatcher.cancel(running)
        order = [flood[0], others[0], flood[1], others[1]]
        for job in order:
            assert isinstance(await ended(job), Reply)
        assert sorted(order, key=lambda job: job.sent_at) == order


@on_loop
async def test_a_request_that_is_refused_for_its_wait_has_another_worker_started(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1, max_workers=2, max_queue_delay_s=1e-9) as pool:
        assert await answer(submit(pool, "a")) == " a a a"
        running = submit(pool, "wait")
        with pytest.raises(QueueDelayError, match=r"would wait for about 0\.0 seconds") as raised:
            submit(pool, "b")
        assert raised.value.retry_after == 1
        assert pool.dispatcher.queued == 0
        await until(lambda: len(pool.roster.ready) == 2)
        assert await answer(submit(pool, "b")) == " b b b"
        pool.dispatcher.cancel(running)


@on_loop
async def test_a_deadline_ends_what_waits_and_what_runs_only_if_it_says_so(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1) as pool:
        now = time.monotonic()
        running = submit(pool, "wait", deadline=Deadline(now + 0.1, "x=0.1", ends_running=False))
        waiting = submit(pool, "exit", deadline=Deadline(now + 0.1, "x=0.1", ends_running=False))
        late = submit(pool, "exit", deadline=Deadline(now - 1, "x=1", ends_running=True))
        for job in (waiting, late):
            terminal = await ended(job)
            assert isinstance(terminal, Error)
            assert (terminal.kind, job.sent_at) == ("DeadlineError", 0.0)
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (1, 0)
        assert running.reply.terminal is None
        pool.dispatcher.cancel(running)
        late = submit(pool, "exit", deadline=Deadline(now - 1, "x=1", ends_running=True))
        assert isinstance(await ended(late), Error)
        stopped = submit(pool, "wait", deadline=Deadline(time.monotonic() + 0.3, "x=0.3", ends_running=True))
        terminal = await ended(stopped)
        assert isinstance(terminal, Error)
        assert terminal.kind == "DeadlineError"
        assert await answer(submit(pool, "a")) == " a a a"
        assert pool.dispatcher.in_flight == 0


@on_loop
async def test_the_job_of_a_client_that_left_ends_once_and_frees_its_place(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1) as pool:
        running, waiting = submit(pool, "token-then-wait", stream=True), submit(pool, "a")
        await started(running)
        pool.dispatcher.cancel(waiting)
        assert pool.dispatcher.queued == 0
        pool.dispatcher.cancel(running)
        pool.dispatcher.cancel(running)
        for job in (waiting, running):
            terminal = await ended(job)
            assert isinstance(terminal, Error)
            assert terminal.kind == "Cancelled"
        await until(lambda: pool.dispatcher.in_flight == 0)
        assert await answer(submit(pool, "b")) == " b b b"


@on_loop
async def test_a_job_that_is_cancelled_in_the_tick_of_its_submission_frees_its_place(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        for _ in range(20):
            pool.dispatcher.cancel(submit(pool, "a"))
        await until(lambda: pool.dispatcher.in_flight == 0)


@on_loop
async def test_a_dead_worker_costs_only_what_clients_have_seen(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=3) as pool:
        seen = submit(pool, "token-then-wait", stream=True)
        await started(seen)
        gone = submit(pool, "wait")
        pool.dispatcher.cancel(gone)
        unseen = submit(pool, "exit-once now")
        queued = [submit(pool, "a") for _ in range(3)]
        terminal = await ended(seen)
        assert isinstance(terminal, Error)
        assert terminal.kind == "WorkerDiedError"
        assert await answer(unseen) == " exit-once now exit-once"
        assert [await answer(job) for job in queued] == [" a a a"] * 3
        assert isinstance(await ended(gone), Error)
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (0, 0)


@on_loop
async def test_a_request_that_kills_its_worker_is_retried_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        terminal = await ended(submit(pool, "exit"))
        assert isinstance(terminal, Error)
        assert terminal.kind == "WorkerDiedError"
        assert pool.availability.status is ModelStatus.UNHEALTHY
        assert await answer(submit(pool, "a")) == " a a a"
        assert pool.availability.status is ModelStatus.HEALTHY


@on_loop
async def test_a_request_that_kills_its_workers_costs_no_other(tmp_path: Path) -> None:
    """Each worker dies while the others are being served, and nobody can know yet which of them it died of."""
    async with pool_of(tmp_path, options={"echo_delay_ms": "50"}, retry_threshold=9) as pool:
        before = [submit(pool, "a") for _ in range(2)]
        killer = submit(pool, "exit")
        after = [submit(pool, "b") for _ in range(2)]
        terminal = await ended(killer)
        assert isinstance(terminal, Error)
        assert terminal.kind == "WorkerDiedError"
        assert [await answer(job) for job in (*before, *after)] == [" a a a"] * 2 + [" b b b"] * 2
        assert [job.deaths for job in (*before, *after)] == [2] * 4
        assert killer.deaths == 3
        assert pool.dispatcher.queued == 0


@on_loop
async def test_clients_that_leave_what_is_tried_one_by_one_let_the_rest_go_on(tmp_path: Path) -> None:
    async with pool_of(tmp_path, options={"echo_delay_ms": "50"}, retry_threshold=9) as pool:
        jobs = [submit(pool, "a") for _ in range(4)]
        for deaths in (1, 2):
            await until(lambda: len(pool.roster.ready) == 1 and all(job.sent_at for job in jobs))
            await until(lambda: all(job.holder is not None for job in jobs))
            os.kill(pids(pool)[0], signal.SIGKILL)
            await until(lambda deaths=deaths: all(job.deaths == deaths for job in jobs))
        pool.dispatcher.cancel(jobs[2])  # it is held back
        pool.dispatcher.cancel(jobs[0])  # it is the first to be tried
        assert await answer(jobs[1]) == " a a a"
        late = submit(pool, "b")
        pool.dispatcher.cancel(jobs[3])
        assert await answer(late) == " b b b"
        assert (pool.dispatcher.queued, pool.dispatcher.in_flight) == (0, 0)


@on_loop
async def test_the_other_worker_takes_over_at_once(tmp_path: Path) -> None:
    async with pool_of(tmp_path, min_workers=2, max_workers=2, parallel_loading=True) as pool:
        await until(lambda: len(pool.roster.ready) == 2)
        jobs = [submit(pool, "exit-once now"), submit(pool, "a")]
        assert await answer(jobs[0]) == " exit-once now exit-once"
        assert await answer(jobs[1]) == " a a a"
        await until(lambda: len(pool.roster.ready) == 2)


@on_loop
async def test_a_hung_worker_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(tmp_path, heartbeat_timeout_s=1.5) as pool:
        pid = pids(pool)[0]
        stream = submit(pool, "token-then-wait", stream=True)
        await started(stream)
        hung = submit(pool, "hang")
        assert isinstance(await ended(stream), Error)
        assert pids(pool) != [pid]
        pool.dispatcher.cancel(hung)
        assert "no sign of life" in caplog.text


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        ("fault_handlers:FailingHandler", "the weights are missing"),
        ("fault_handlers:GreedyHandler", "the weights do not fit: 17 GiB are not free"),
        ("fault_handlers:RaisingHandler", "ValueError: not a model"),
        ("fault_handlers:ExitingHandler", "the worker process exited with code 9 while it loaded the model"),
        ("fault_handlers:NoSuchHandler", "NoSuchHandler"),
        ("no_such_module:Handler", "No module named 'no_such_module'"),
    ],
)
@on_loop
async def test_a_failed_load_is_final(tmp_path: Path, handler: str, reason: str) -> None:
    async with pool_of(tmp_path, handler, min_workers=2, max_workers=2) as pool:
        assert pool.availability.status is ModelStatus.FAILED
        assert pool.availability.failure is not None
        assert reason in pool.availability.failure.message
        with pytest.raises(ModelNotReadyError, match=r"Model is not ready: model: .*"):
            submit(pool, "a")
        await until(lambda: not children())


@on_loop
async def test_a_load_that_takes_too_long_fails(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "fault_handlers:GatedHandler", model_loading_timeout_s=0.5) as pool:
        assert pool.availability.status is ModelStatus.FAILED
        assert pool.availability.failure is not None
        assert "model_loading_timeout=0.5" in pool.availability.failure.message


@on_loop
async def test_a_worker_that_cannot_be_started_is_a_failed_load(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    load = load_of(tmp_path)
    pool = WorkerPool(pool_settings(load))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    try:
        pool.start()
        await pool.availability.settled.wait()
        assert pool.availability.status is ModelStatus.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pool.availability.failure is not None
    assert "the worker process could not be started: " in pool.availability.failure.message
    assert "Too many open files" in pool.availability.failure.message
    await pool.stop()


@on_loop
async def test_a_worker_that_cannot_be_started_again_fails_what_waits(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        waiting = submit(pool, "wait")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            os.kill(pids(pool)[0], signal.SIGKILL)
            terminal = await ended(waiting)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert isinstance(terminal, Error)
        assert terminal.kind == "ModelNotReadyError"
        await until(lambda: pool.availability.status is ModelStatus.HEALTHY)
        assert await answer(submit(pool, "a")) == " a a a"


@on_loop
async def test_a_fault_of_the_pool_itself_fails_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unsendable: Any = {"model_id": object()}
    pool = WorkerPool(pool_settings(load_of(tmp_path, options=unsendable)))
    pool.start()
    await pool.availability.settled.wait()
    assert pool.availability.status is ModelStatus.FAILED
    assert "no longer supervised" in caplog.text
    with pytest.raises(ModelNotReadyError, match="TypeError"):
        submit(pool, "a")
    await pool.stop()
    assert not children()


@on_loop
async def test_a_long_temporary_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 150)))
    async with pool_of(tmp_path) as pool:
        assert await answer(submit(pool, "a")) == " a a a"


@on_loop
async def test_a_stop_while_the_model_loads_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool(pool_settings(load_of(tmp_path, "fault_handlers:GatedHandler")))
    pool.start()
    await until(lambda: bool(children()))
    await pool.stop()
    del pool
    gc.collect()
    await until(lambda: not children())
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("ticks", range(1, 9))
@on_loop
async def test_a_stop_while_the_process_starts_leaves_nothing(tmp_path: Path, ticks: int) -> None:
    pool = WorkerPool(pool_settings(load_of(tmp_path)))
    pool.start()
    for _ in range(ticks):
        await asyncio.sleep(0)
    await pool.stop()
    assert not children()


@on_loop
async def test_nothing_is_accepted_while_the_model_loads(tmp_path: Path) -> None:
    load = load_of(tmp_path, "fault_handlers:GatedHandler")
    pool = WorkerPool(pool_settings(load))
    pool.start()
    assert pool.availability.status is ModelStatus.PENDING
    with pytest.raises(ModelNotReadyError, match="it is loading"):
        submit(pool, "a")
    (tmp_path / "go").touch()
    await pool.availability.settled.wait()
    assert pool.availability.status is ModelStatus.HEALTHY
    assert await answer(submit(pool, "a")) == " a a a"
    await pool.stop()


@on_loop
async def test_a_model_that_cannot_be_loaded_again_is_tried_again(tmp_path: Path) -> None:
    async with pool_of(tmp_path, "fault_handlers:OnceHandler") as pool:
        job = submit(pool, "a", tokens=100_000_000)
        os.kill(pids(pool)[0], signal.SIGKILL)
        await until(lambda: pool.availability.status is ModelStatus.UNHEALTHY)
        queued = submit(pool, "a")  # the restart may succeed
        for waiting in (job, queued):
            terminal = await ended(waiting)
            assert isinstance(terminal, Error)
            assert terminal.kind == "ModelNotReadyError"
            assert "could not be loaded again" in terminal.message
        with pytest.raises(ModelNotReadyError, match="could not be loaded again"):
            submit(pool, "a")
        (tmp_path / "loaded").unlink()
        await until(lambda: pool.availability.status is ModelStatus.HEALTHY)
        assert await answer(submit(pool, "b")) == " b b b"


# --- what makes no progress ---


@on_loop
async def test_a_worker_without_progress_is_killed_and_only_the_overdue_request_fails(tmp_path: Path) -> None:
    async with pool_of(tmp_path, predict_timeout_s=3.0, max_in_flight=4) as pool:
        (pid,) = pids(pool)
        stuck = submit(pool, "wait")
        await asyncio.sleep(1.5)  # so that the other one is not overdue
        other = submit(pool, "wait-once")
        terminal = await ended(stuck)
        assert isinstance(terminal, Error)
        assert (terminal.kind, terminal.message) == (
            "PredictTimeoutError",
            "The request made no progress within predict_timeout=3 seconds",
        )
        assert await answer(other) == " wait-once wait-once wait-once"
        assert pids(pool) != [pid]


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_request_that_lasts_longer_than_the_timeout_is_left_alone(tmp_path: Path, stream: bool) -> None:
    async with pool_of(tmp_path, predict_timeout_s=2.0, options={"echo_delay_ms": "100"}) as pool:
        job = submit(pool, "a", stream=stream, tokens=40)
        terminal = await ended(job)
        assert isinstance(terminal, End if stream else Reply)


@on_loop
async def test_one_request_without_progress_among_others_does_not_cost_the_worker(tmp_path: Path) -> None:
    options = {"echo_delay_ms": "20"}
    async with pool_of(tmp_path, predict_timeout_s=1.0, options=options) as pool:
        (pid,) = pids(pool)
        stream = submit(pool, "a", stream=True, tokens=150)
        terminal = await ended(submit(pool, "wait"))
        assert isinstance(terminal, Error)
        assert terminal.kind == "PredictTimeoutError"
        assert isinstance(await ended(stream), End)
        assert pids(pool) == [pid]
        assert pool.dispatcher.in_flight == 0


@on_loop
async def test_a_worker_that_keeps_the_place_of_a_cancelled_request_is_killed(tmp_path: Path) -> None:
    handler = "fault_handlers:StubbornHandler"
    async with pool_of(tmp_path, handler, predict_timeout_s=0.5, max_in_flight=1) as pool:
        stubborn = submit(pool, "stubborn")
        pool.dispatcher.cancel(stubborn)
        assert await answer(submit(pool, "a")) == " a a a"


# --- how many workers ---


@on_loop
async def test_workers_are_added_while_requests_wait_and_end_when_idle(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_workers=3, max_in_flight=1, max_idle_s=0.5) as pool:
        waiting = [submit(pool, "wait") for _ in range(3)]
        await until(lambda: pool.dispatcher.in_flight == 3)
        assert len(pool.roster.ready) == 3
        for job in waiting:
            pool.dispatcher.cancel(job)
        await until(lambda: len(pool.roster.ready) == 1)
        await until(lambda: len(children()) == 1)
        assert await answer(submit(pool, "a")) == " a a a"


@on_loop
async def test_a_worker_that_cannot_be_added_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"max_workers": 2, "max_in_flight": 1, "retry_threshold": 0}
    async with pool_of(tmp_path, "fault_handlers:CrowdedHandler", **changes) as pool:
        running, waiting = submit(pool, "a", tokens=100_000_000), submit(pool, "b")
        await until(lambda: "could not load the model again" in caplog.text)
        pool.dispatcher.cancel(running)
        assert await answer(waiting) == " b b b"
        assert pool.availability.status is ModelStatus.HEALTHY
        with pytest.raises(ModelMemoryError, match="17 GiB are not free"):
            await pool.scale(2, 2)


@on_loop
async def test_scaling(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await pool.scale(3, None)
        assert len(pool.roster.ready) == 3
        await pool.scale(None, 1)
        assert len(pool.roster.ready) == 1
        await pool.scale(0, 0)
        with pytest.raises(ModelNotReadyError, match="All model workers has been shutdown: model"):
            submit(pool, "a")
        assert pool.availability.status is ModelStatus.UNHEALTHY
        await pool.scale(0, 1)
        assert pool.availability.status is ModelStatus.HEALTHY
        assert await answer(submit(pool, "a")) == " a a a"
        with pytest.raises(BadParameterError, match="min_worker is 3, max_worker 2"):
            await pool.scale(3, 2)
        with pytest.raises(BadParameterError, match="device is 7"):
            await pool.scale(1, 1, 7)


@on_loop
async def test_a_wait_for_more_workers_ends_if_they_are_no_longer_wanted(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    async with pool_of(tmp_path, "fault_handlers:GatedHandler") as pool:
        (tmp_path / "go").unlink()
        scaled = asyncio.create_task(pool.scale(2, 2))
        await until(lambda: len(children()) == 2)
        await pool.scale(1, 1)
        await scaled
        scaled = asyncio.create_task(pool.scale(2, 2))
        await until(lambda: len(children()) == 2)
        await pool.stop()
        with pytest.raises(ModelNotReadyError):
            await scaled


@on_loop
async def test_a_worker_that_is_too_much_finishes_its_requests(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1, options={"echo_delay_ms": "5"}) as pool:
        job = submit(pool, "a", stream=True, tokens=100)
        await started(job)
        await pool.scale(0, 0)
        assert (len(pool.roster.ready), pool.dispatcher.in_flight) == (0, 1)
        assert isinstance(await ended(job), End)
        await until(lambda: not children())


@on_loop
async def test_each_group_has_its_devices_and_its_workers(tmp_path: Path) -> None:
    changes = {
        "device_sets": plan_devices("*", 2, ("0", "1", "2", "3")),
        "environment": {"THREADS": "7"},
        "parallel_loading": True,
    }
    async with pool_of(tmp_path, "fault_handlers:EnvironmentHandler", **changes) as pool:
        await pool.scale(1, 1)
        assert list(pool.roster.gauges.values()) in (
            [{"gpu_0": 1, "gpu_1": 1, "threads": 7}, {"gpu_2": 1, "gpu_3": 1, "threads": 7}],
            [{"gpu_2": 1, "gpu_3": 1, "threads": 7}, {"gpu_0": 1, "gpu_1": 1, "threads": 7}],
        )
        await pool.scale(2, 2, device=2)
        assert [replicas.ready for replicas in pool.replica_sets] == [1, 2]


# --- deaths ---


@on_loop
async def test_too_many_deaths_fail_the_model(tmp_path: Path) -> None:
    async with pool_of(tmp_path, retry_threshold=1) as pool:
        first = submit(pool, "exit")  # one death more than is allowed: it is tried twice
        terminal = await ended(first)
        assert isinstance(terminal, Error)
        await until(lambda: pool.availability.status is ModelStatus.FAILED)
        assert pool.availability.failure is not None
        assert "more than retry_threshold=1 times within 600 seconds" in pool.availability.failure.message
        with pytest.raises(ModelNotReadyError, match="retry_threshold"):
            submit(pool, "a")
        with pytest.raises(ModelNotReadyError):
            await pool.scale(2, 2)


def test_deaths_are_forgotten_after_a_while() -> None:
    deaths = CrashLoopDetector(threshold=2, window_s=10)
    assert [deaths.record(now) for now in (0, 1, 11, 12, 13)] == [False, False, False, False, True]


@on_loop
async def test_a_worker_waits_for_the_reader_of_its_answer(tmp_path: Path) -> None:
    async with pool_of(tmp_path, predict_timeout_s=1.0) as pool:
        body = msgspec.json.encode({"inputs": "flood", "stream": True})
        job = pool.submit(Input("invocations", {}, [("data", body)]), on_overflow=lambda: None)
        for _ in range(3):
            await until(lambda: job.reply.is_held)
            await asyncio.sleep(1.5)
            assert job.reply.terminal is None
            assert 1 << 20 < len(job.reply.take()) < 16 << 20
            job.release()
        pool.dispatcher.cancel(job)
        await until(lambda: pool.dispatcher.in_flight == 0)
        assert await answer(submit(pool, "a")) == " a a a"


@on_loop
async def test_a_drain_finishes_what_was_accepted(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1) as pool:
        jobs = [submit(pool, "a", tokens=20_000), submit(pool, "b")]
        draining = asyncio.create_task(pool.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(ModelNotReadyError, match="shutting down"):
            submit(pool, "c")
        await draining
        assert all(isinstance(job.reply.terminal, Reply) for job in jobs)


@on_loop
async def test_a_drain_fails_what_does_not_finish(tmp_path: Path) -> None:
    async with pool_of(tmp_path, max_in_flight=1) as pool:
        jobs = [submit(pool, "wait"), submit(pool, "a")]
        await pool.drain(0.1)
        for job in jobs:
            assert isinstance(job.reply.terminal, Error)
            assert job.reply.terminal.kind == "ModelNotReadyError"


@on_loop
async def test_the_worker_ends_with_exit_code_0_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with pool_of(tmp_path, spawned=True) as pool:
        assert len(children()) == 1
        assert pool.roster.gauges
    assert "exited with code 0" in caplog.text
    assert not children()


def test_the_pause_between_restarts() -> None:
    backoff = Backoff()
    pauses = [backoff.pause_s(was_of_use=False) for _ in range(10)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert backoff.pause_s(was_of_use=True) == 0.1


EARLIER: set[str] = set()  # processes of other tests' fixtures


@pytest.fixture(autouse=True)
def _others_children() -> None:
    EARLIER.clear()
    EARLIER.update(children())


def children() -> list[str]:
    """Return the processes that the test has started and not yet waited for, but for the one that Python keeps itself.

    That one is there from the first test that shares memory or spawns with multiprocessing.
    """
    parents = (parent_of_workers(), os.getpid())
    started = [pid for parent in parents for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return [pid for pid in started if pid not in EARLIER and b"multiprocessing.resource_tracker" not in command_of(pid)]


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class FakeLoadingWorker:
    """A worker without a process, which loads for ever."""

    loading = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = None

    async def load(self, *_: object) -> None:
        type(self).loading += 1
        await asyncio.Event().wait()

    async def reap(self) -> None:
        pass


@pytest.mark.parametrize(("parallel", "at_once"), [(True, 16), (False, 1)])
@on_loop
async def test_workers_load_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool, at_once: int
) -> None:
    """However many are asked for: each load takes a process, and memory beside that of the model."""
    monkeypatch.setattr(FakeLoadingWorker, "loading", 0)
    monkeypatch.setattr(Membership, "new_worker", lambda members, devices: FakeLoadingWorker("fake"))
    monkeypatch.setattr(Membership, "forget", lambda members, worker: None)
    settings = pool_settings(load_of(tmp_path, FAULTS, {}), min_workers=40, max_workers=40, parallel_loading=parallel)
    pool = WorkerPool(settings)
    pool.start()
    try:
        await until(lambda: FakeLoadingWorker.loading >= at_once)
        for _ in range(10):  # time for more of them, if they did not wait
            await asyncio.sleep(0)
        assert FakeLoadingWorker.loading == at_once
        assert sum(replicas.size for replicas in pool.replica_sets) == 40
    finally:
        await pool.stop()


# --- jobs that a worker has ahead, so that the scheduler of its engine can choose among them ---


def held(pool: WorkerPool) -> list[WorkerRequests]:
    """Return what the ready workers hold, in the order in which they get requests."""
    workers = [worker for replicas in pool.replica_sets for worker in replicas.workers if worker in pool.roster.ready]
    return [worker.requests for worker in sorted(workers, key=lambda worker: worker.ready_at)]


async def in_order(jobs: list[Job]) -> list[str]:
    """Wait for the answers; return the prompts in the order in which they got a place."""
    for job in jobs:
        assert isinstance(await ended(job), Reply)
    return [job.request.body().split(b'"')[3].decode() for job in sorted(jobs, key=lambda job: job.sent_at)]


@on_loop
async def test_the_scheduler_chooses_among_jobs_that_still_wait(tmp_path: Path) -> None:
    async with pool_of(tmp_path, WINDOW, max_in_flight=1, job_queue_size=6) as pool:
        (requests,) = held(pool)
        running = submit(pool, "wait")
        jobs = [submit(pool, prompt) for prompt in "aecdb"]
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued, len(requests.ahead)) == (1, 5, 4)
        await until(lambda: [*pool.roster.gauges.values()] == [{"waiting_elsewhere": 1}])

        # What the worker has ahead is cancelled, ends by its deadline and fills the queue like what waits elsewhere.
        late = submit(pool, "x", deadline=Deadline(time.monotonic() + 0.05, "0.05", ends_running=False))
        with pytest.raises(QueueFullError):
            submit(pool, "y")
        pool.dispatcher.cancel(jobs[1])
        assert pool.dispatcher.queued == 5
        terminal = await ended(late)
        assert isinstance(terminal, Error)
        assert terminal.kind == "DeadlineError"
        assert pool.dispatcher.queued == 4
        await until(lambda: set(requests.ahead) == {job.id for job in jobs if job is not jobs[1]})
        pool.dispatcher.cancel(running)
        assert await in_order([job for job in jobs if job is not jobs[1]]) == ["d", "c", "b", "a"]
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (0, 0)

        # A request that the worker refuses before it has a place is answered at once.
        running = submit(pool, "wait")
        refused = submit(pool, "a", tokens=-1)
        assert isinstance(await ended(refused), Reply)
        assert (pool.dispatcher.in_flight, pool.dispatcher.queued) == (1, 0)

        # The turns of keys and priorities are those of the queue.
        keys = [submit(pool, "a", tenant=b"1"), submit(pool, "z", tenant=b"1")]
        assert len(requests.ahead) == 2
        keys += [submit(pool, "b", tenant=b"2")]
        await until(lambda: not requests.ahead)
        assert pool.dispatcher.queued == 3
        pool.dispatcher.cancel(running)
        assert await in_order(keys) == ["a", "b", "z"]

        running = submit(pool, "wait")
        urgent = [submit(pool, "y"), submit(pool, "z"), submit(pool, "a", priority=1)]
        await until(lambda: not requests.ahead)
        pool.dispatcher.cancel(running)
        assert (await in_order(urgent))[0] == "a"


@on_loop
async def test_jobs_ahead_go_to_a_worker_that_is_free_or_lives(tmp_path: Path) -> None:
    async with pool_of(tmp_path, WINDOW, max_in_flight=1, min_workers=2, max_workers=2) as pool:
        await until(lambda: len(pool.roster.ready) == 2)
        first, second = held(pool)
        running = [submit(pool, "wait") for _ in range(2)]
        jobs = [submit(pool, "a") for _ in range(4)]
        assert (len(first.ahead), len(second.ahead)) == (2, 2)
        for job in list(second.in_flight.values()):
            pool.dispatcher.cancel(job)
        for job in jobs:
            if not job.cancelled:
                assert await answer(job) == " a a a"
        assert [job.cancelled for job in running] == [False, True]

        running[1] = submit(pool, "wait")
        jobs = [submit(pool, "a") for _ in range(4)]
        assert (len(first.ahead), len(second.ahead)) == (2, 2)
        (killed,) = [
            worker for replicas in pool.replica_sets for worker in replicas.workers if worker.requests is first
        ]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: not first.in_flight)
        pool.dispatcher.cancel(running[1])
        pool.dispatcher.cancel(running[0])
        for job in jobs:
            assert await answer(job) == " a a a"
            assert not job.deaths
