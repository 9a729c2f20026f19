"""Models that sleep: what they take is given back, and requests are refused, or wake them.

The levels are those of vLLM. At level 0 nothing is freed. At level 1 the workers live on: the weights are on the host,
and the KV cache is gone. At level 2 the workers end, so that nothing is left in memory of host or device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from frontend.management.models import to_the_end
from lmi_server.contract.errors import AbortedError, BadParameterError, LmiServerError, ModelNotReadyError, RequestError
from lmi_server.contract.protocol import Command, Sleep, WakeUp
from lmi_server.serving.models.model import Model
from lmi_server.serving.pool.availability import Gate
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.replicas import ReplicaSet

if TYPE_CHECKING:
    from lmi_server.supervisor.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

PAUSED, ON_HOST, GONE = range(3)
ABORT, WAIT = "abort", "wait"

_PAUSE_S = 0.02
_FREED_S = 30.0  # for workers to free the places of requests that were aborted, or to end
_WATCH_S = 1.0


@dataclass(eq=False)
class _Rest:
    """How deep a pool sleeps, since when (time.time()), and which workers have been told."""

    level: int
    since: float = field(default_factory=time.time)
    told: WeakSet[WorkerProcess] = field(default_factory=WeakSet)  # workers know their pool, which must not be kept


class Sleepers:
    """The models that sleep. Requests that run get `drain_timeout_s` seconds to finish before a model falls asleep.

    A worker has `limit_s` seconds to fall asleep, or to wake up; one that takes longer is killed, and a new one
    starts. A model that is loaded again meanwhile gets workers that are awake.
    """

    def __init__(self, drain_timeout_s: float, wakes_on_request: bool, limit_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._wakes_on_request = wakes_on_request
        self._locks: WeakKeyDictionary[Model, asyncio.Lock] = WeakKeyDictionary()
        self._rests: WeakKeyDictionary[WorkerPool, _Rest] = WeakKeyDictionary()

    def level(self, model: Model) -> int | None:
        """Return how deep a model sleeps, None if it is awake."""
        rest = None if model.pool is None else self._rests.get(model.pool)
        return None if rest is None else rest.level

    async def sleep(self, model: Model, level: int, mode: str) -> None:
        """Put a model to sleep, or deeper to sleep; requests that run finish first, or are aborted.

        Raises BadParameterError if it sleeps deeper already, and the error with which a worker refuses. The model is as
        before then.
        """
        async with self._lock(model):
            await model.until_reloaded()
            pool = model.loaded()
            if level == GONE and not all(isinstance(replicas, ReplicaSet) for replicas in pool.replica_sets):
                raise BadParameterError("Parameter level is 2; the workers of a cluster end with their deployment")
            before = self._rests.get(pool)
            if before is not None and before.level >= level:
                _refuse_lighter(model, before.level, level)
                return
            self._close(model, pool)
            try:
                await self._quiet(model, pool, mode)
                rest = _Rest(level)
                await self._lie_down(pool, rest)
            except BaseException:
                if before is None:
                    _open(pool)
                raise
            self._rests[pool] = rest
            model.notes["sleep"] = lambda: self._note(model)
            logger.info("model %s sleeps at level %d", model.label, level)

    async def wake_up(self, model: Model) -> None:
        """Wake a model, and return once it serves; nothing happens if it is awake. Raises what loading it raises."""
        async with self._lock(model):
            pool = model.loaded()
            rest = self._rests.pop(pool, None)
            if rest is None:
                return
            try:
                if rest.level == GONE:
                    await _start_workers(pool)
                elif rest.level == ON_HOST:
                    await self._wake(pool.roster.ready)
            finally:
                _open(pool)
            logger.info("model %s is awake", model.label)

    async def keep_asleep(self) -> None:
        """Put workers to sleep that were started in the place of dead ones."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for pool, rest in list(self._rests.items()):
                new = [worker for worker in pool.roster.ready if worker not in rest.told]
                if new and rest.level == ON_HOST and self._rests.get(pool) is rest:
                    rest.told.update(new)
                    task = asyncio.create_task(self._put_to_sleep(pool, rest, new))  # another pool need not wait
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _put_to_sleep(self, pool: WorkerPool, rest: _Rest, workers: Sequence[WorkerProcess]) -> None:
        await asyncio.gather(*(self._attempt(worker, Sleep()) for worker in workers))
        if self._rests.get(pool) is not rest:  # it was woken meanwhile
            await self._wake(workers)

    def _lock(self, model: Model) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())

    def _note(self, model: Model) -> dict[str, Any]:
        level = self.level(model)
        return {"isSleeping": False} if level is None else {"isSleeping": True, "level": level}

    def _close(self, model: Model, pool: WorkerPool) -> None:
        pool.availability.paused = (
            f"Model {model.label} is asleep; POST /wake_up wakes it, and wake_on_request=true lets requests do it"
        )
        if self._wakes_on_request:
            capacity, waits_for = pool.settings.job_queue_size, f"for model {model.label} to wake up"
            pool.gate = Gate(lambda: to_the_end(self.wake_up(model)), capacity, waits_for)

    async def _quiet(self, model: Model, pool: WorkerPool, mode: str) -> None:
        """Return once no request is left: let them finish, or end them with an error."""
        error = AbortedError(f"Model {model.label} was put to sleep; send the request again once it is awake")
        if mode == WAIT and not await _is_idle(pool, self._drain_timeout_s):
            logger.warning("model %s: requests have not finished; they are aborted, for it is to sleep", model.label)
        pool.dispatcher.abort(error)
        if not await _is_idle(pool, _FREED_S):
            raise ModelNotReadyError(f"Model {model.label} stays awake: its workers do not let go of requests")

    async def _lie_down(self, pool: WorkerPool, rest: _Rest) -> None:
        if rest.level == ON_HOST:
            workers = list(pool.roster.ready)
            rest.told.update(workers)
            outcomes = await asyncio.gather(*(self._attempt(worker, Sleep()) for worker in workers))
            refusals = [outcome for outcome in outcomes if outcome is not None]
            if refusals:
                await self._wake(worker for worker, refusal in zip(workers, outcomes, strict=True) if refusal is None)
                raise as_refusal(refusals[0])
        elif rest.level == GONE:
            await _end_workers(pool)

    async def _attempt(self, worker: WorkerProcess, command: Command) -> LmiServerError | None:
        """Send a command to a worker; return the error with which it answers, or that it does not.

        One that does not answer, or cannot wake up, is killed.
        """
        failure: LmiServerError
        try:
            async with asyncio.timeout(self._limit_s):
                await worker.controls.call(command)
            return None
        except LmiServerError as error:
            if not isinstance(command, WakeUp):
                return error
            failure = error
        except TimeoutError:
            late = f"did not answer {command.operation} within sleep_timeout={self._limit_s:g} seconds"
            failure = ModelNotReadyError(f"A worker {late}, and is started again")
        logger.error("worker %s is killed at %s: %s", worker.name, command.operation, failure)
        worker.kill()
        return failure

    async def _wake(self, workers: Iterable[WorkerProcess]) -> None:
        """Wake workers. One that cannot wake is killed; the one that takes its place is awake."""
        await asyncio.gather(*(self._attempt(worker, WakeUp()) for worker in workers))


def as_refusal(error: LmiServerError) -> LmiServerError:
    """Return what a client gets for an error of a worker: 400 for what its handler cannot."""
    return BadParameterError(error.message) if type(error) is RequestError else error


def _refuse_lighter(model: Model, before: int, level: int) -> None:
    if level < before:
        raise BadParameterError(
            f"Parameter level is {level}; model {model.label} sleeps at level {before}: POST /wake_up first"
        )


def _open(pool: WorkerPool) -> None:
    pool.availability.paused = None
    pool.gate = None


async def _is_idle(pool: WorkerPool, limit_s: float) -> bool:
    """Return whether nothing waits or runs, or ceases to within `limit_s` seconds."""
    ends = time.monotonic() + limit_s
    while pool.dispatcher.queued or pool.dispatcher.in_flight:
        if time.monotonic() >= ends:
            return False
        await asyncio.sleep(_PAUSE_S)
    return True


async def _end_workers(pool: WorkerPool) -> None:
    """End every worker of a pool; the next request may start one again."""
    for replicas in pool.replica_sets:
        max_workers = replicas.max_workers
        replicas.scale(0, 0)
        replicas.scale(0, max_workers)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FREED_S):
            while pool.roster.everyone:  # noqa: ASYNC110 - a reaped worker says nothing
                await asyncio.sleep(_PAUSE_S)
    for worker in pool.roster.everyone:
        worker.kill()


async def _start_workers(pool: WorkerPool) -> None:
    for replicas in pool.replica_sets:
        replicas.scale(*pool.scaling.bounds_of(replicas))
    await pool.scaling.complete()
