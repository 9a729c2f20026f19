"""The statistics of a rolling batch: counters, gauges, and a line in the log every few seconds.

The log lines and their terms are SGLang's, so that its advice on tuning applies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from handlers.rolling_batch.schedule.plan import Retraction, StepPlan
from handlers.rolling_batch.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

_LINE_INTERVAL_S = 5.0


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the state after the last step.

    `waiting` counts the scheduler's queue alone. `used_tokens` belong to running sequences, `kept_tokens` are cached
    and evicted when memory is needed. `throughput` counts generated tokens per second, over the last interval of the
    log.
    """

    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    retracted_requests: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    kept_tokens: int = 0
    new_token_ratio: float = 0.0
    throughput: float = 0.0
    step_seconds: float = 0.0


@dataclass(slots=True)
class _Interval:
    """Counts since the last line of the log."""

    began: float
    generated: int = 0
    started: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class StepRecorder:
    """Accounts for steps. `clock` returns seconds.

    `waiting_elsewhere` are requests that wait for the engine in the front end's queue. The lines of the log count them.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stats = EngineStats()
        self.waiting_elsewhere = 0
        self._scheduler = scheduler
        self._clock = clock
        self._interval = _Interval(clock())
        self._step_began = clock()

    def begin(self) -> None:
        """Record that a step begins."""
        self._step_began = self._clock()
        if self.stats.running == 0:  # idle time does not count for the throughput
            self._interval.began = self._step_began

    def end(self, plan: StepPlan, sampled: int, accepted: int = 0) -> None:
        """Account for a step; write a line to the log every few seconds.

        It sampled `sampled` tokens, `accepted` of them behind drafted ones.
        """
        now = self._clock()
        self._count(plan, sampled, now - self._step_began)
        self.stats.accepted_tokens += accepted
        self.stats.drafted_tokens += sum(map(len, plan.drafts.values()))
        if now - self._interval.began >= _LINE_INTERVAL_S:
            self._write_lines(now)

    def retracted(self, retraction: Retraction) -> None:
        """Account for sequences that went back to the queue; there may be no step behind it."""
        self.stats.retracted_requests += len(retraction.sequences)
        logger.warning(
            "decode out of memory happened, #retracted_reqs: %d, #new_token_ratio: %.4f -> %.4f",
            *(len(retraction.sequences), retraction.ratio_before, retraction.ratio_after),
        )

    def observe(self) -> None:
        """Read the state of the scheduler."""
        stats = self.stats
        stats.running = len(self._scheduler.running)
        stats.waiting = len(self._scheduler.waiting)
        stats.used_tokens = sum(sequence.computed for sequence in self._scheduler.running)
        stats.kept_tokens = self._scheduler.slots.cached_tokens
        stats.new_token_ratio = self._scheduler.expectation.ratio

    def _count(self, plan: StepPlan, sampled: int, seconds: float) -> None:
        stats, interval = self.stats, self._interval
        computed = sum(chunk.end - chunk.start for chunk in plan.prefill)
        cached = sum(sequence.cached for sequence in plan.started)
        stats.steps += 1
        stats.generated_tokens += sampled
        stats.prompt_tokens += computed
        stats.cached_prompt_tokens += cached
        stats.step_seconds = seconds
        self.observe()
        interval.generated += sampled
        interval.started += len(plan.started)
        interval.prompt_tokens += computed
        interval.cached_tokens += cached

    def _write_lines(self, now: float) -> None:
        stats, interval = self.stats, self._interval
        stats.throughput = interval.generated / (now - interval.began)
        waiting = stats.waiting + self.waiting_elsewhere
        usage = f"token usage: {stats.used_tokens / self._scheduler.limits.kv_tokens:.2f}"
        if interval.started:
            logger.info(
                "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, %s, #running-req: %d, #queue-req: %d",
                *(
                    interval.started,
                    interval.prompt_tokens,
                    interval.cached_tokens,
                    usage,
                    stats.running,
                    waiting,
                ),
            )
        if interval.generated:
            logger.info(
                "Decode batch. #running-req: %d, #token: %d, %s, gen throughput (token/s): %.2f, #queue-req: %d",
                *(stats.running, stats.used_tokens, usage, stats.throughput, waiting),
            )
        self._interval = _Interval(now)
