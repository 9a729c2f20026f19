"""The engine's interface to the code that computes its steps: the types between it and a runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from handlers.rolling_batch.schedule.plan import Sequence, StepPlan

if TYPE_CHECKING:
    import torch

    from handlers.rolling_batch.lora.layers import LoraLayers


@dataclass(frozen=True)
class StepLogits:
    """Logits of a step, (rows, vocabulary): first one row per sequence of `sampled`, to choose its next token from.

    `prompt_rows` has, for each sequence that reports the log probabilities of its prompt, the position of the first
    token scored in this step, and the rows of logits with the tokens behind them. `draft_rows` has, for each sequence
    with a draft, the rows from which the tokens behind each drafted one follow.
    """

    logits: torch.Tensor
    sampled: list[Sequence]
    prompt_rows: list[tuple[Sequence, int, slice]]
    draft_rows: Mapping[Sequence, range] = field(default_factory=dict)

    def of_sampled(self) -> torch.Tensor:
        """Return the rows of `sampled`."""
        rows = len(self.sampled)
        return self.logits if len(self.logits) == rows else self.logits[:rows]


class StepRunner(Protocol):
    """Computes the steps that the scheduler plans."""

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        ...

    @property
    def scores_prompts(self) -> bool:
        """Whether `run` returns the logits of prompt tokens, from which their log probabilities follow."""
        ...

    @property
    def lora(self) -> LoraLayers:
        """The adapters of the model. Raises RequestError if it takes none."""
        ...

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        """Compute a step; `prompt_scored` has the numbers of the sequences whose prompt tokens are scored as well.

        `before` (rows,) are the tokens of the step before, on the device, if the engine runs ahead: the sequences'
        newest tokens are negative numbers then, by which `device_arrays.known_tokens` finds them.
        """
        ...

    def stop(self) -> None:
        """Nothing is computed any more."""
        ...
