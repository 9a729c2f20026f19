"""Starts speculation as the options say, with the times of steps measured on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from handlers.rolling_batch.options import RollingBatchOptions
from handlers.rolling_batch.runner.model_runner import ModelRunner
from handlers.rolling_batch.schedule.plan import Sequence, StepPlan
from handlers.rolling_batch.speculation.draft_model import DraftModel, StepCosts
from handlers.rolling_batch.speculation.drafting import Speculation
from handlers.rolling_batch.speculation.step_times import StepTimes

if TYPE_CHECKING:
    from handlers.rolling_batch.engine import RollingBatchEngine

logger = logging.getLogger(__name__)

_MEASURED_ROWS, _MEASUREMENTS = 8, 6


def speculate(
    engine: RollingBatchEngine, runner: ModelRunner, drafting: ModelRunner | None, options: RollingBatchOptions
) -> dict[str, Any]:
    """Let the engine draft tokens as the options say. Return what was decided."""
    if options.speculative_draft_model is None:
        return {}
    if runner.states is not None:
        logger.warning(
            "option.speculative_draft_model has no effect: the model's layers keep states, from which no drafted token"
            " can be taken back"
        )
        return {}
    seconds, share = step_seconds(runner)
    if drafting is None:
        engine.speculate(Speculation(options.speculative_length, StepTimes(share)), _clock(runner))
        return {"row_share": round(share, 3)}
    draft_seconds, draft_share = step_seconds(drafting)
    costs = StepCosts(share, draft_seconds / seconds, draft_share * draft_seconds / seconds)
    engine.speculate(DraftModel(drafting, options.speculative_length, runner.vocabulary, costs))
    return {
        "draft_model": options.speculative_draft_model,
        "row_share": round(costs.row, 3),
        "draft_share": round(costs.draft, 3),
    }


def step_seconds(runner: ModelRunner) -> tuple[float, float]:
    """Measure a decoding step with one row in seconds, and how much longer each further row takes, as a share."""
    sequence = Sequence(0, [0, 0], 1, _MEASURED_ROWS + 1, slot=0, computed=1)

    clock = _clock(runner)

    def seconds(drafted: int) -> float:
        plan = StepPlan([sequence], [], drafts={sequence: [0] * drafted} if drafted else {})
        began = clock()
        runner.run(plan, set()).logits[0, 0].item()  # waits for the device
        return clock() - began

    one, several = (min(seconds(drafted) for _ in range(_MEASUREMENTS)) for drafted in (0, _MEASURED_ROWS))
    runner.cache.trim(0, 0)
    return one, max((several - one) / _MEASURED_ROWS / one, 0.0)


def _clock(runner: ModelRunner) -> Callable[[], float]:
    """Return what times steps: on the CPU it counts the processor time of this thread, which computes a part of each.

    So the turns of other programs do not count, as in `kernel_choice.thread_seconds`.
    """
    return time.thread_time if runner.device.type == "cpu" else time.perf_counter
