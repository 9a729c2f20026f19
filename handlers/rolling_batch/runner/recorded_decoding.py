"""Lets passes that only decode run as CUDA graphs or compiled code, where these compute the same as eager passes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from handlers.rolling_batch.attention.decode_passes import (
    COMPILE_KEY,
    GRAPH_KEY,
    Capture,
    DecodePasses,
    Step,
    make_passes,
    run_once,
)
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.lora.bank import AdapterBank
from handlers.rolling_batch.lora.pass_adapters import PassAdapters
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.runner.compiled_step import Compile, CompiledStep
from handlers.rolling_batch.runner.step_messages import Pass
from lmi_server.contract.errors import first_line

logger = logging.getLogger(__name__)


Compute = Callable[[Pass], torch.Tensor]
"""Computes a pass as it has run so far; returns the logits of the rows to keep."""


class RecordedDecoding:
    """Decoding over `cache`: `step` computes the rows, whose tensors are on `device`."""

    def __init__(self, step: Step, cache: KVCache | PagedCache, device: torch.device) -> None:
        self._step = step
        self._cache = cache
        self._device = device
        self.passes: DecodePasses | None = None  # None: all passes run eagerly

    def compile(self, rows: int, compiler: Compile, eager: Compute) -> bool:
        """Compile decoding of up to `rows` rows; return whether steps run the compiled code."""
        for kept in (*self._cache.keys, *self._cache.values):
            torch._dynamo.mark_static(kept)  # only rows and columns vary
        step = CompiledStep(self._step, compiler)
        passes = self._make(COMPILE_KEY, step, rows, lambda: run_once, eager)
        if passes is None or step.is_eager:
            return False
        self._step, self.passes = step, passes
        logger.info("%s: decoding runs as compiled code", COMPILE_KEY)
        return True

    def capture(self, rows: int, capture: Callable[[], Capture], eager: Compute) -> int:
        """Record decoding of up to `rows` rows; return the number of recorded shapes, 0 if there are none."""
        passes = self._make(GRAPH_KEY, self._step, rows, capture, eager)
        if passes is None:
            return 0
        self.passes = passes
        logger.info("%s: decoding runs as %d CUDA graphs", GRAPH_KEY, passes.shapes)
        return passes.shapes

    def new_bank(self) -> AdapterBank | None:
        """Return a bank for the adapters of recorded passes; None if there are no such passes, or they are compiled."""
        if self.passes is None or isinstance(self._step, CompiledStep):
            return None
        return AdapterBank(self.passes.max_rows, self._device)

    def logits(self, step: Pass, before: torch.Tensor | None, adapters: PassAdapters) -> torch.Tensor | None:
        """Return the logits of the rows to keep; None if the pass has to run eagerly.

        It has if it has chunks, adapters that no graph adds, or more rows than there are sequences, and if it cannot be
        recorded with its adapters.
        """
        passes = self.passes
        if passes is None or step.chunks or len(step.slots) > passes.max_rows or adapters.are_hooked:
            return None
        ids = known_tokens(upload(step.token_ids, self._device), before)
        try:
            logits = passes.logits(ids, step.positions, step.slots, adapters.additions)
        except RuntimeError as error:
            if adapters.additions is None:
                raise
            adapters.leave_unrecorded(first_line(error), step.keep)
            return None
        return logits if step.keep == list(range(len(logits))) else logits[upload(step.keep, logits.device)]

    def _make(
        self, key: str, step: Step, rows: int, capture: Callable[[], Capture], eager: Compute
    ) -> DecodePasses | None:
        idle_slot = self._cache.idle_slot if isinstance(self._cache, PagedCache) else None
        return make_passes(
            key,
            lambda: DecodePasses(step, rows, self._cache.max_len, self._device, capture(), idle_slot),
            lambda ids, places, slots: eager(Pass(ids, places, slots, [], [0], [], [])),
        )
