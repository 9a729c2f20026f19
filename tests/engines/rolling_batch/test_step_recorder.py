"""What the rolling batch logs and counts."""

from __future__ import annotations

import logging

import pytest

from handlers.rolling_batch.schedule.plan import Sequence
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from handlers.rolling_batch.step_recorder import StepRecorder


class Steps:
    """A scheduler and a clock of its own, by which every step takes a second."""

    def __init__(self, kv_tokens: int = 1000, conservativeness: float = 1.0) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(SchedulerLimits(2, kv_tokens, 50, 50, conservativeness=conservativeness))
        self.recorder = StepRecorder(self.scheduler, lambda: self.now)

    def add(self, number: int, tokens: list[int], new: int) -> None:
        self.scheduler.add(Sequence(number, list(tokens), len(tokens), new))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.recorder.begin()
            plan = self.scheduler.plan()
            if plan.retraction is not None:
                self.recorder.retracted(plan.retraction)
            self.scheduler.advance(plan)
            finished = [*plan.decode, *(chunk.sequence for chunk in plan.prefill if chunk.completes_prompt)]
            for sequence in finished:
                sequence.tokens.append(1)
                if sequence.generated == sequence.max_new_tokens:
                    self.scheduler.remove(sequence)
            self.now += 1.0
            self.recorder.end(plan, len(finished))


def test_a_line_every_few_seconds_reports_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    steps = Steps()
    for name in "abc":
        steps.add(name, [*range(20), ord(name)], new=30)
    steps.run(10)
    assert [record.getMessage() for record in caplog.records] == [
        "Prefill batch. #new-seq: 2, #new-token: 21, #cached-token: 20, token usage: 0.05,"
        " #running-req: 2, #queue-req: 1",
        "Decode batch. #running-req: 2, #token: 49, token usage: 0.05, gen throughput (token/s): 1.80, #queue-req: 1",
        "Decode batch. #running-req: 2, #token: 59, token usage: 0.06, gen throughput (token/s): 2.00, #queue-req: 1",
    ]
    stats = steps.recorder.stats
    assert (stats.running, stats.waiting, stats.used_tokens, stats.throughput) == (2, 1, 59, 2.0)
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (21, 20, 19)


def test_idle_time_does_not_count_for_the_throughput(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    steps = Steps()
    steps.add(1, [1, 2], new=3)
    steps.run(3)
    steps.now += 1000
    steps.add(2, [3, 4], new=8)
    steps.run(5)
    assert "gen throughput (token/s): 1.60" in caplog.records[-1].getMessage()


def test_a_retraction_is_a_warning_that_names_the_ratios(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(kv_tokens=60, conservativeness=0.1)
    steps.add(1, [1] * 10, new=50)
    steps.add(2, [2] * 10, new=50)
    steps.run(30)
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.getMessage().startswith("decode out of memory happened, #retracted_reqs: 1, #new_token_ratio: 0.0")
    assert steps.recorder.stats.retracted_requests == 1
    assert steps.recorder.stats.waiting == 1
