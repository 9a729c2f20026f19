"""The messages of rank 0 to the other ranks of its group: plain data as msgpack, one message per step.

Requests, scheduler, tokenizer and sampler live on rank 0 alone. A step's message carries the inputs of the model (token
ids, positions, slots), not their reasons: the other ranks need no state but the KV cache and cannot disagree with rank
0 about the schedule. A message for 64 sequences takes half a kilobyte. The tokens that rank 0 samples from a step's
logits are token ids of the next message: neither logits nor samples need a message of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from handlers.ranks.communicator import Communicator, GroupBrokenError
from handlers.rolling_batch.attention.rows import ChunkRows, StepRows
from handlers.rolling_batch.schedule.page_table import PageStep
from handlers.rolling_batch.schedule.slot_contents import SlotTrim
from handlers.rolling_batch.schedule.slots import SlotCopy
from handlers.rolling_batch.schedule.state_table import StateStep


class Pass(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One step: do `trims`, then `copies`, or what `pages` has; then compute the rows, whose fields are as in StepRows.

    A copy whose source a chunk reads directly is made after the step, before anything else of the next one.

    Row i of the pass is `token_ids[i]` at `positions[i]`. The first rows belong to `slots`, the next ones to `chunks`,
    and any others are padding. `keep` are the rows whose logits are wanted, with padding behind them. `states` is for
    models with recurrent layers alone.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    chunks: list[ChunkRows]
    keep: list[int]
    trims: list[SlotTrim]
    copies: list[SlotCopy]
    states: StateStep | None = None
    pages: PageStep | None = None

    def rows(self) -> StepRows:
        """Return the rows as attention takes them."""
        positions = np.array(self.positions[: len(self.slots)], np.int64)
        return StepRows(np.array(self.slots, np.int64), positions, self.chunks)


class Measure(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Compute `rows` rows without a KV cache, which is not allocated yet."""

    rows: int


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Allocate a KV cache of `slots` slots of `max_len` tokens, or of pages for `kv_tokens` tokens in all."""

    slots: int
    max_len: int
    kv_tokens: int


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """End; the worker stops."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Pass | Measure | Prepare | Stop).decode


class Ranks:
    """The ranks that a model is split over by `communicator`; None: it is whole, and nothing is sent."""

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator

    @property
    def are_several(self) -> bool:
        """Whether the model is split."""
        return self._communicator is not None

    def send(self, message: Pass | Measure | Prepare | Stop) -> None:
        """Send a message from rank 0 to the others."""
        if self._communicator is not None:
            self._communicator.broadcast(encode(message))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Compute a step on rank 0 that was sent to the others. Raises GroupBrokenError if it fails.

        Whether the other ranks have computed it is unknown then, so the group has to end.
        """
        try:
            yield
        except BaseException as error:
            if self._communicator is not None:
                raise GroupBrokenError(f"a step failed on rank 0: {type(error).__name__}: {error}") from error
            raise

    def received(self) -> Iterator[Pass | Measure | Prepare]:
        """Yield what rank 0 sends, until it sends Stop."""
        assert self._communicator is not None
        while not isinstance(message := decode(self._communicator.receive()), Stop):
            yield message
