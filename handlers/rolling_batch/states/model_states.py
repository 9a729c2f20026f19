"""The states of a model in the rolling batch: what the runner needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from handlers.rolling_batch.attention.pass_inputs import PassInputs
from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.schedule.state_table import StateStep
from handlers.rolling_batch.states.mixers import install, segments_of
from handlers.rolling_batch.states.probe import Mixer, find_mixers
from handlers.rolling_batch.states.store import Segment, StateStore, bytes_per_row


class ModelStates:
    """The mixers of a model and, once they are allocated, the states of its sequences."""

    def __init__(self, mixers: list[Mixer], device: torch.device) -> None:
        self._mixers, self._device = mixers, device
        self._shapes = [mixer.form.shapes() for mixer in mixers]
        self.store: StateStore

    @classmethod
    def from_model(cls, model: Any, inputs: PassInputs, device: torch.device) -> ModelStates | None:
        """Return the states of a model; None if it has none. Raises UnsupportedAttentionError."""
        mixers = find_mixers(model, inputs)
        return cls(mixers, device) if mixers else None

    @property
    def bytes_per_sequence(self) -> int:
        return bytes_per_row(self._shapes)

    @property
    def unread(self) -> frozenset[Any]:
        """Linear layers whose weights the mixers read without calling them."""
        return frozenset().union(*(mixer.unread for mixer in self._mixers))

    def allocate(self, rows: int, has_idle: bool = False) -> None:
        """Make room for the states of `rows` sequences; from now on the model computes passes over them alone.

        `has_idle`: there is one row more, for rows that fill up a pass.
        """
        self.store = StateStore(self._shapes, rows + has_idle)
        install(self._mixers, self.store)

    def begin(self, slots: list[int], positions: list[int], chunks: list[ChunkRows], step: StateStep | None) -> None:
        """Set what the rows of the next pass are: one of each of `slots`, then `chunks`."""
        step = StateStep({}) if step is None else step
        self.store.copy(step.copies)
        self.store.begin(segments_of(slots, positions, chunks, step, self._device))

    def begin_decoding(self, rows: torch.Tensor) -> None:
        """Set that the rows of the next passes decode, each with the states in one of `rows`, (rows,)."""
        self.store.begin([Segment(0, len(rows), rows, decodes=True, continues=True)])

    def end(self, step: StateStep | None) -> None:
        """Keep what the pass leaves behind."""
        self.store.copy(() if step is None else step.saves)

    def on_rows(self, enter: Callable[[int, int], None]) -> None:
        """Have `enter` told which rows of the pass the next layers compute, at each change."""
        self.store.enter = enter
