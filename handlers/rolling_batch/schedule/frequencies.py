"""Rotary embeddings whose frequencies depend on the length of a text (longrope, dynamic NTK): which length counts.

`generate` of transformers takes the frequencies for the whole prompt, and then for each token those of the text up to
it; keys in the cache stay as they are. Phi 3 and its relatives compute all keys anew where a text gets longer than the
border (what transformers 5 leaves out there: a text goes on as `generate(use_cache=False)` has it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handlers.rolling_batch.schedule.plan import Sequence, StepPlan


@dataclass(frozen=True)
class FrequencyBorder:
    """Up to `length` tokens all texts have the same frequencies.

    `is_step`: longer ones have others, the same for all (longrope), and not each length its own (dynamic).
    `recomputes`: keys are computed anew where a text crosses the border.
    """

    length: int
    is_step: bool
    recomputes: bool

    def regime(self, tokens: int) -> int:
        """Return a number for the frequencies of texts of so many tokens, 0 up to the border."""
        if tokens <= self.length:
            return 0
        return 1 if self.is_step else tokens

    def crossed(self, sequence: Sequence) -> bool:
        """Whether the keys of a sequence have to be computed anew."""
        return self.recomputes and sequence.regime == 0 and len(sequence.tokens) > self.length

    def lengths(self, plan: StepPlan) -> list[int]:
        """Return for each row of a plan the number of tokens whose frequencies it has."""
        return [self._length(of, place) for of, start, end in plan.stretches() for place in range(start, end)]

    def _length(self, sequence: Sequence, place: int) -> int:
        if self.recomputes:
            return self.length + 1 if sequence.regime else min(place + 1, self.length)
        return max(place + 1, sequence.prompt_len)
