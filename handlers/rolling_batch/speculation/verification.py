"""Whether drafted tokens are what the sampler chooses, place by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.plan import Sequence, StepPlan
from handlers.rolling_batch.schedule.scheduler import Scheduler
from handlers.rolling_batch.speculation.drafting import Drafter

if TYPE_CHECKING:
    from torch import Tensor

Choose = Callable[[list[Sequence], "Tensor"], None]
"""Chooses and emits the next token of each sequence from its row of logits."""


class Verification:
    """The drafts of one step; `is_live` says whether a sequence goes on."""

    def __init__(
        self, plan: StepPlan, scheduler: Scheduler, drafter: Drafter | None, is_live: Callable[[Sequence], bool]
    ) -> None:
        self._drafts = plan.drafts
        self._scheduler = scheduler
        self._drafter = drafter
        self._is_live = is_live

    def run(self, logits: StepLogits, choose: Choose) -> int:
        """Choose the tokens behind drafted ones, as long as the draft is right; return how many."""
        if not self._drafts:
            return 0
        going = list(logits.draft_rows)
        total = 0
        for place in range(max(map(len, self._drafts.values()))):
            going = [sequence for sequence in going if self._is_right(sequence, place)]
            if not going:
                break
            for sequence in going:
                self._scheduler.draft_accepted(sequence)
            choose(going, logits.logits[[logits.draft_rows[sequence][place] for sequence in going]])
            total += len(going)
        return total

    def _is_right(self, sequence: Sequence, place: int) -> bool:
        """Whether the sequence goes on and its newest token is the drafted one; the drafter learns when it is not."""
        draft = self._drafts[sequence]
        if not self._is_live(sequence) or place >= len(draft):
            return False
        right = sequence.tokens[-1] == draft[place]
        if self._drafter is not None and (not right or place == len(draft) - 1):
            self._drafter.observe(sequence.number, len(draft), place + right)
        return right
