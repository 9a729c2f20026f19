"""Lets passes run as CUDA graphs or compiled code, where these compute the same as eager passes.

These are passes that only decode, and as graphs over pages those with prompts that are not long.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import torch

from handlers.rolling_batch.attention.decode_passes import (
    COMPILE_KEY,
    GRAPH_KEY,
    Capture,
    DecodePasses,
    DecodeStep,
    Step,
    difference_of,
    log_no_effect,
    make_passes,
    run_once,
)
from handlers.rolling_batch.attention.gpu_times import launch_share
from handlers.rolling_batch.attention.kv_cache import KVCache
from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.images.prompt import EmbeddedRows
from handlers.rolling_batch.lora.bank import AdapterBank
from handlers.rolling_batch.lora.pass_adapters import PassAdapters
from handlers.rolling_batch.pages import mixed_passes
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.mixed_passes import Compute as ComputeRows
from handlers.rolling_batch.pages.mixed_passes import MixedPasses
from handlers.rolling_batch.runner.compiled_step import Compile, CompiledStep
from handlers.rolling_batch.runner.step_messages import Pass
from handlers.rolling_batch.schedule.page_table import PagesAdded, PageStep
from handlers.rolling_batch.schedule.state_table import StateStep
from handlers.rolling_batch.states.model_states import ModelStates
from lmi_server.contract.errors import first_line

logger = logging.getLogger(__name__)


Compute = Callable[[Pass], torch.Tensor]
"""Computes a pass as it has run so far; returns the logits of the rows to keep."""


class RecordedDecoding:
    """Decoding over `cache` and `states`: `step` computes the rows, whose tensors are on `device`.

    `over_pages` computes rows of all kinds if the cache has pages.
    """

    def __init__(
        self,
        step: DecodeStep,
        cache: KVCache | PagedCache,
        device: torch.device,
        over_pages: ComputeRows,
        states: ModelStates | None = None,
    ) -> None:
        self._step: Step = step
        self._over_pages = over_pages
        self._turns, self._states = step.turns, states
        self._cache = cache
        self._device = device
        self.passes: DecodePasses | None = None  # None: all passes run eagerly
        self.mixed: MixedPasses | None = None  # None: those with prompts do

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
        """Record decoding of up to `rows` rows, and over pages steps with prompts as well.

        Return the number of recorded shapes that decode, 0 if there are none.
        """
        own = capture()
        passes = self._make(GRAPH_KEY, self._step, rows, lambda: own, eager)
        if passes is None:
            return 0
        self.passes, self.mixed = passes, None
        logger.info("%s: decoding runs as %d CUDA graphs", GRAPH_KEY, passes.shapes)
        if isinstance(self._cache, PagedCache) and self._states is None:
            self.mixed = self._make_mixed(self._cache, rows, own, eager)
        return passes.shapes

    def _make_mixed(self, cache: PagedCache, rows: int, capture: Capture, eager: Compute) -> MixedPasses | None:
        """Return recorded passes with prompts if they compute the same as eager ones; otherwise None, and log why."""
        step = _mixed_step(cache, rows)
        counts = mixed_passes.row_counts()
        try:
            if self._device.type == "cuda":
                counts = mixed_passes.paying(
                    counts, lambda count: launch_share(lambda: eager(_prompts(count, cache.max_len)))
                )
                if not counts:
                    logger.info("%s: steps with prompts run eagerly: the GPU takes longer than the host", GRAPH_KEY)
                    return None
            mixed = MixedPasses(self._over_pages, cache, rows, counts, self._device, capture)
            expected = eager(step).clone()
            arguments = (step.token_ids, step.positions, step.slots, step.chunks, step.keep)
            reason = difference_of(mixed.logits(*arguments, None).clone(), expected)
        except RuntimeError as error:
            reason = first_line(error)
        _forget(cache)
        if reason:
            log_no_effect(GRAPH_KEY, reason, "steps with prompts run eagerly")
            return None
        logger.info(
            "%s: steps of up to %d tokens with prompts run as %d CUDA graphs", GRAPH_KEY, mixed.max_rows, mixed.shapes
        )
        return mixed

    def new_bank(self) -> AdapterBank | None:
        """Return a bank for the adapters of recorded passes; None if no recorded pass adds any.

        Compiled ones add none, and those of layers with states neither: mixers call linear layers for some of the rows.
        """
        if self.passes is None or self._states is not None or isinstance(self._step, CompiledStep):
            return None
        rows = self.passes.max_rows if self.mixed is None else max(self.passes.max_rows, self.mixed.max_rows)
        return AdapterBank(rows, self._device)

    def takes(self, step: Pass) -> bool:
        """Whether a pass of a model without adapters can run as a recorded one."""
        if step.chunks:
            return self.mixed is not None and self.mixed.takes(len(step.slots), step.chunks, len(step.keep))
        return self.passes is not None and len(step.slots) <= self.passes.max_rows

    def logits(
        self,
        step: Pass,
        before: torch.Tensor | None,
        adapters: PassAdapters,
        embedded: EmbeddedRows | None = None,
    ) -> torch.Tensor | None:
        """Return the logits of the rows to keep; None if the pass has to run eagerly.

        It has if no recorded pass takes it, or has its tokens of images or its adapters, and if it cannot be recorded
        with its adapters.
        """
        if adapters.are_hooked or not self.takes(step):
            return None
        if embedded is not None and (step.chunks or not (self._turns and embedded.is_text)):
            return None
        try:
            return (
                self._mixed(step, before, adapters) if step.chunks else self._decoded(step, before, adapters, embedded)
            )
        except RuntimeError as error:
            if adapters.additions is None:
                raise
            adapters.leave_unrecorded(first_line(error), step.keep)
            return None

    def _decoded(
        self, step: Pass, before: torch.Tensor | None, adapters: PassAdapters, embedded: EmbeddedRows | None
    ) -> torch.Tensor:
        assert self.passes is not None
        ids = known_tokens(upload(step.token_ids, self._device), before)
        logits = self._computed(self.passes, ids, step, adapters, embedded)
        return logits if step.keep == list(range(len(logits))) else logits[upload(step.keep, logits.device)]

    def _mixed(self, step: Pass, before: torch.Tensor | None, adapters: PassAdapters) -> torch.Tensor:
        assert self.mixed is not None
        rows = (step.token_ids, step.positions, step.slots, step.chunks, step.keep)
        return self.mixed.logits(*rows, before, adapters.additions)

    def _computed(
        self,
        passes: DecodePasses,
        ids: torch.Tensor,
        step: Pass,
        adapters: PassAdapters,
        embedded: EmbeddedRows | None,
    ) -> torch.Tensor:
        rows, more = len(step.slots), []
        if self._turns:
            turned = None if embedded is None else embedded.positions
            more.append(step.positions[:rows] if turned is None else turned[0, :rows].tolist())
        if self._states is None:
            return passes.logits(ids, step.positions, step.slots, adapters.additions, more)
        assert step.states is not None
        more.append([step.states.rows[slot] for slot in step.slots])
        self._states.store.copy(step.states.copies)
        logits = passes.logits(ids, step.positions, step.slots, None, more)
        self._states.end(step.states)
        return logits

    def _make(
        self, key: str, step: Step, rows: int, capture: Callable[[], Capture], eager: Compute
    ) -> DecodePasses | None:
        idle_slot = self._cache.idle_slot if isinstance(self._cache, PagedCache) else None
        states = self._states
        more_idle = [0] * self._turns + ([] if states is None else [states.store.idle_row])
        # The slots are empty, and both ways compute the first token of slot 0. With states it is the second one: the
        # first has none. Each way has a row of its own for them.
        place, rows_of_states = int(states is not None), itertools.count()

        def probe() -> Pass:
            state = StateStep({0: next(rows_of_states)})
            return Pass([1], [place], [0], [], [0], [], [], None if states is None else state)

        def recorded(passes: DecodePasses) -> torch.Tensor:
            if states is not None:
                states.store.clear((0, 1))  # the recording has written there
            return self._computed(passes, torch.tensor([1]), probe(), PassAdapters(), None)

        return make_passes(
            key,
            lambda: DecodePasses(step, rows, self._cache.max_len, self._device, capture(), idle_slot, more_idle),
            recorded,
            lambda: eager(probe()),
        )


def _mixed_step(cache: PagedCache, sequences: int) -> Pass:
    """Return a step of a row that decodes and a chunk, each in a page of its own; of a chunk alone if two are too many.

    A recorded pass is for so many `sequences`.
    """
    single = min(cache.slots, cache.pages, sequences) > 1
    length = min(3, cache.max_len)
    first, slot = int(single), int(single)
    chunk = ChunkRows(slot, 0, length, first, first + length, slot)
    return Pass(
        [1] * first + [2, 3, 4][:length],
        [0] * first + list(range(length)),
        [0] * first,
        [chunk],
        [*range(first), first + length - 1],
        [],
        [],
        pages=PageStep([PagesAdded(own, 0, [own]) for own in range(first + 1)]),
    )


def _prompts(rows: int, max_len: int) -> Pass:
    """Return a step of prompts with so many rows in all, in the page of no sequence."""
    chunks = [
        ChunkRows(0, 0, min(max_len, rows - first), first, min(first + max_len, rows), 0)
        for first in range(0, rows, max_len)
    ]
    positions = [place for chunk in chunks for place in range(chunk.end)]
    return Pass([0] * rows, positions, [], chunks, [rows - 1], [], [])


def _forget(cache: PagedCache) -> None:
    """Let the slots of `_mixed_step` have no pages."""
    cache.apply(PageStep([PagesAdded(slot, 0, [cache.pages]) for slot in range(min(2, cache.slots))]))
