"""The adapters of the rows of a pass: of an eager pass by hooks, of a recorded one in the bank that it reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from handlers.rolling_batch.attention.decode_passes import GRAPH_KEY
from handlers.rolling_batch.lora.bank import AdapterBank
from handlers.rolling_batch.lora.layers import LoraLayers, LoraWeights
from handlers.rolling_batch.schedule.plan import StepPlan

logger = logging.getLogger(__name__)


class PassAdapters:
    """Sets the adapters of passes, once `lora` is there: None until the first adapter.

    `additions` is what the pass adds if it is recorded. None: it has no adapters, or runs eagerly with them.
    """

    def __init__(self) -> None:
        self.lora: LoraLayers | None = None
        self.additions: AdapterBank | None = None
        self._rows: list[LoraWeights | None] = []  # of the pass

    @property
    def are_hooked(self) -> bool:
        """Whether a row of the pass has an adapter that hooks add."""
        return self.lora is not None and self.lora.is_active

    def begin(self, plan: StepPlan, kept: list[int], is_recorded: bool) -> None:
        """Set the adapters of an arranged plan, whose rows `kept` have logits.

        `is_recorded`: without adapters it would run as a recorded pass.
        """
        if self.lora is None:
            return
        self._rows = [sequence.adapter for sequence, start, end in plan.stretches() for _ in range(start, end)]
        self.additions = None
        bank = self.lora.bank
        sequences = (*plan.decode, *(chunk.sequence for chunk in plan.prefill))
        if bank is None or not is_recorded or not any(self._rows) or any(entry.images for entry in sequences):
            self.lora.begin(self._rows, kept)
            return
        try:
            self.additions = self.lora.begin_recorded(bank, self._rows, kept if plan.prefill else None)
        except torch.OutOfMemoryError:
            self.leave_unrecorded("there is no memory for the adapters in use", kept)

    def begin_call(self, rows: list[int], kept: list[int]) -> None:
        """Set the adapters of the rows of the pass that one call of the model computes."""
        if self.lora is not None:
            self.lora.begin([self._rows[row] for row in rows], kept)

    def leave_unrecorded(self, reason: str, kept: Sequence[int]) -> None:
        """Let this pass, and all later ones with adapters, run eagerly."""
        assert self.lora is not None
        logger.warning("%s has no effect on steps with adapters, they run eagerly: %s", GRAPH_KEY, reason)
        self.lora.bank = self.additions = None
        self.lora.begin(self._rows, kept)
