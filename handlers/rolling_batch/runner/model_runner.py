"""Runs a step plan through a transformers causal language model, as one flat forward pass if the model allows that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from handlers.checkpoints.placement import is_spread, main_device
from handlers.ranks.communicator import Communicator
from handlers.rolling_batch.attention.decode_passes import COMPILE_KEY, GRAPH_KEY, Capture, log_no_effect
from handlers.rolling_batch.attention.frequencies import RowFrequencies
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape, kept_type, no_packed_cache
from handlers.rolling_batch.attention.probe import UnsupportedAttentionError
from handlers.rolling_batch.cpu import kernel_choice
from handlers.rolling_batch.cpu.block_linears import limit_exact_rows
from handlers.rolling_batch.cpu.kernel_choice import ALL, Crossovers
from handlers.rolling_batch.cpu.linears import lay_out_linears
from handlers.rolling_batch.fused.modules import fuse
from handlers.rolling_batch.fused.row_kernels import is_fusible
from handlers.rolling_batch.images.prompt import EmbeddedRows, embedded_rows
from handlers.rolling_batch.lora.layers import LoraLayers
from handlers.rolling_batch.lora.pass_adapters import PassAdapters
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.choice import page_size
from handlers.rolling_batch.runner.compiled_step import Compile, torch_compile
from handlers.rolling_batch.runner.flat_passes import FlatPasses
from handlers.rolling_batch.runner.load_check import LoadCheck, keeps_rows, vocabulary_of
from handlers.rolling_batch.runner.recorded_decoding import RecordedDecoding
from handlers.rolling_batch.runner.step_layout import arrange, lay_out, pad_rows, rows_to_keep
from handlers.rolling_batch.runner.step_memory import StepMemory
from handlers.rolling_batch.runner.step_messages import Measure, Pass, Prepare, Ranks, Stop
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.frequencies import FrequencyBorder
from handlers.rolling_batch.schedule.plan import StepPlan
from handlers.rolling_batch.sequences.passes import CODE_ERRORS, SequencePasses
from handlers.rolling_batch.states.model_states import ModelStates
from lmi_server.contract.errors import RequestError, first_line

logger = logging.getLogger(__name__)


class ModelRunner:
    """A model and its KV cache. `prepare` allocates the cache, `run` computes steps.

    `page` is how many tokens a page of the cache has; 0 for slots, None to choose by device. Models without
    attention, and models whose passes are not flat, have slots in any case.
    `kv_dtype` is option.kv_cache_dtype, None for keys and values in the model's type.

    If the model is split over ranks, rank 0 calls these two and the other ranks `follow`.
    """

    scores_prompts = True

    def __init__(
        self,
        model: Any,
        max_len: int,
        communicator: Communicator | None = None,
        check: LoadCheck | None = None,
        is_local: bool = True,
        page: int | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        self._model = model.eval()
        self.device = main_device(model)
        self.dtype: torch.dtype = model.dtype
        self._kv_dtype = kv_dtype
        self.kept_dtype = kept_type(kv_dtype, self.device, self.dtype)
        self.vocabulary = vocabulary_of(model)
        self._check = check or LoadCheck(model, max_len)
        self._ranks = Ranks(communicator)
        self._is_spread = is_spread(model)
        self._implementation: str = model.config._attn_implementation
        self.frequencies: RowFrequencies | None = None  # None: they are the same for texts of every length
        self.border: FrequencyBorder | None = None  # where they change with the length
        self._eager: FlatPasses | SequencePasses  # computes what is not recorded
        try:
            self._eager = FlatPasses(model, kv_dtype)
        except CODE_ERRORS as error:
            self._eager = self._sequence_passes(error)
        self.states: ModelStates | None = self._eager.states
        if self.states is not None and (reason := self._why_divided()) is not None:
            raise UnsupportedAttentionError(f"its layers keep states, and {reason}")
        # The check and the probe come first: both need the modules as they were loaded.
        fuses = is_fusible(self.device, self.dtype) and is_local and not self._is_spread
        self.fused, self._crossovers = _fuse(model, self.device, self.states) if fuses else ({}, Crossovers())
        self.page = 0
        if self._eager.takes_pages:
            self.page = page_size(self.layers, self.dtype) if page is None else page
        self.cache: KVCache | PagedCache
        self._memory: StepMemory
        self._recorded: RecordedDecoding | None = None  # None: passes are not flat
        self._adapters = PassAdapters()

    @property
    def layers(self) -> list[LayerShape]:
        """What each attention layer keeps per token, as elements of `kept_dtype`."""
        return self._eager.shapes

    def _sequence_passes(self, reason: Exception) -> SequencePasses:
        """Return passes that compute sequence by sequence, if the model can; raise `reason` otherwise."""
        if self._ranks.are_several or self.frequencies is not None:
            raise reason
        if self._kv_dtype is not None:
            raise no_packed_cache(
                self._kv_dtype, f"the model runs sequence by sequence: {first_line(reason)}"
            ) from reason
        try:
            passes = SequencePasses(self._model, self._implementation)
        except CODE_ERRORS as error:
            raise reason from error
        logger.info("%s runs sequence by sequence: %s", type(self._model).__name__, first_line(reason))
        return passes

    def change_frequencies(self, max_len: int) -> None:
        """Give each row the rotary embeddings for its length, if these change within `max_len` tokens."""
        if isinstance(self._eager, SequencePasses) or self.states is not None or self._ranks.are_several:
            return
        self.frequencies = rows = RowFrequencies.from_model(self._model, max_len)
        if rows is not None:
            self.border = FrequencyBorder(rows.length, rows.is_step, rows.recomputes)
            self.page = 0

    def measure(self, rows: int) -> None:
        """Compute `rows` rows before there is a KV cache, for the caller to see the memory of a step."""
        self._ranks.send(Measure(rows))
        self._eager.measure(rows)

    def prepare(
        self, slots: int, max_len: int, decode_rows: int = ALL, state_rows: int = 2, kv_tokens: int = 0
    ) -> None:
        """Allocate the KV cache: `slots` slots of up to `max_len` tokens. A step decodes at most `decode_rows` rows.

        If layers keep states, there is room for those of `state_rows` sequences, two at least. Pages have room for
        `kv_tokens` tokens in all, by default for `max_len` in every slot. If `page` is 0 afterwards and was not before,
        nothing is allocated yet: call it again, for slots.

        Raises UnsupportedAttentionError if the logits over that cache differ from the model's own.
        """
        kv_tokens = kv_tokens or slots * max_len
        self._ranks.send(Prepare(slots, max_len, kv_tokens))
        if self.states is not None:
            self.states.allocate(state_rows, has_idle=self.page > 0)
        self._allocate(slots, max_len, kv_tokens, decode_rows)
        try:
            self._check.compare(self)
        except UnsupportedAttentionError as error:
            is_last_way = isinstance(self._eager, SequencePasses) or self.states is not None
            if is_last_way or self.fused.get("decoder_layers"):
                raise
            self._eager = self._sequence_passes(error)
            if isinstance(self.cache, PagedCache):
                self.cache.free()
                self.page = 0
                return
            self._allocate(slots, max_len, kv_tokens, decode_rows)
            self._check.compare(self)
        if isinstance(self._eager, SequencePasses):
            self._eager.together = self._check.computes_together(self)

    def _allocate(self, slots: int, max_len: int, kv_tokens: int, decode_rows: int = ALL) -> None:
        eager, self._recorded = self._eager, None
        if isinstance(eager, SequencePasses):
            self.cache = KVCache(self.layers, slots, max_len, self.dtype)
            self._memory = StepMemory(self.cache, reads_sources=False)
            eager.use(self.cache)
            return
        if self.page:
            self.cache = PagedCache(self.layers, slots, max_len, kv_tokens, self.page, self.dtype)
        else:
            self.cache = KVCache(self.layers, slots, max_len, self.kept_dtype)
        self._memory = StepMemory(self.cache, reads_sources=True)
        step = eager.use(self.cache)
        self._recorded = RecordedDecoding(step, self.cache, self.device, eager.over_pages, self.states)
        if self.fused and not eager.in_call_order:
            self.fused |= eager.fuse_layers(self._crossovers, decode_rows, at_once=self.frequencies is None)
            self._crossovers.keep()

    def compile(self, rows: int, compiler: Compile = torch_compile) -> bool:
        """Compile decoding of up to `rows` rows; return whether steps run the compiled code."""
        if (reason := self._uncompilable()) is not None:
            log_no_effect(COMPILE_KEY, reason)
            return False
        assert self._recorded is not None
        return self._recorded.compile(rows, compiler, self._compute)

    def capture(self, rows: int, capture: Callable[[], Capture]) -> int:
        """Record decoding of up to `rows` rows; return the number of recorded shapes, 0 if there are none."""
        if (reason := self.uncapturable()) is not None:
            log_no_effect(GRAPH_KEY, reason)
            return 0
        assert self._recorded is not None
        return self._recorded.capture(rows, capture, self._compute)

    def use_helpers(self) -> bool:
        """Let helper threads compute passes that need no OpenMP, if there are such; return whether there are."""
        return isinstance(self._eager, FlatPasses) and self._eager.use_helpers()

    def _uncompilable(self) -> str | None:
        if isinstance(self._eager, FlatPasses) and self._eager.attention.has_kernels:
            return "on the CPU a model in bf16 or fp32 runs on kernels of this project, which torch cannot compile"
        return self._why_divided() if self.states is None else "its layers keep states"

    def uncapturable(self) -> str | None:
        """Return why decoding cannot be recorded as CUDA graphs, as far as that is known before."""
        if self.states is not None and not self.page:
            return "its layers keep states, and none of them attends"
        return "the model is on the CPU" if self.device.type == "cpu" else self._why_divided()

    def _why_divided(self) -> str | None:
        if self.frequencies is not None:
            return "its rotary embeddings change with the length"
        if self._ranks.are_several:
            return "the model is split over ranks"
        if isinstance(self._eager, SequencePasses):
            return "the model runs sequence by sequence"
        return "the model is spread over several devices" if self._is_spread else None

    @property
    def may_run_ahead(self) -> bool:
        """Whether the device computes while the host goes on, and has the tokens of a step before the host has them."""
        # A state that has gone a token beyond the end of its sequence cannot be taken back.
        return self.device.type != "cpu" and self._why_divided() is None and self.states is None

    @property
    def lora(self) -> LoraLayers:
        """The adapters of the model, once it is prepared. Raises RequestError if the model is split over ranks."""
        if self._ranks.are_several:
            raise RequestError(
                "a model that is split over ranks takes no LoRA adapters; set option.tensor_parallel_degree=1"
            )
        if self._adapters.lora is None:
            pad = pad_rows if self.device.type == "cpu" else list
            self._adapters.lora = lora = LoraLayers(self._model, keeps_rows(self._model), pad, _unread(self.states))
            lora.bank = None if self._recorded is None else self._recorded.new_bank()
            if self.states is not None:
                self.states.on_rows(lora.enter)
        return self._adapters.lora

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        """Compute a step; return the logits that the sampler needs. On a GPU it is computed when this has returned.

        `prompt_scored` has the numbers of the sequences whose prompt tokens in this step are scored as well. Raises
        GroupBrokenError if the step fails and other ranks compute it, too.
        """
        plan = arrange(plan, self._eager.row_by_row)
        kept = rows_to_keep(plan, prompt_scored)
        step = lay_out(plan, kept.rows, self._eager.row_by_row)
        self._adapters.begin(plan, kept.rows, self._recorded is not None and self._recorded.takes(step))
        if isinstance(self._eager, FlatPasses):
            step = self._eager.pad(step, self._adapters.are_hooked)
        if self.frequencies is not None and self.border is not None:
            self.frequencies.begin(self.border.lengths(plan))
        embedded = embedded_rows(plan, len(step.token_ids))
        self._ranks.send(step)
        with self._ranks.in_step():
            logits = self._compute(step, before, embedded)
        if len(logits) > len(kept.rows):
            logits = logits[: len(kept.rows)]
        return StepLogits(logits, kept.sampled, kept.prompt_rows, kept.draft_rows)

    def _compute(
        self, step: Pass, before: torch.Tensor | None = None, embedded: EmbeddedRows | None = None
    ) -> torch.Tensor:
        """Return the logits of the rows to keep, padding last. Only rank 0 uses them."""
        self._memory.arrange(step)
        if self._recorded is not None:
            logits = self._recorded.logits(step, before, self._adapters, embedded)
            if logits is not None:
                return logits
        if isinstance(self._eager, SequencePasses):
            return self._eager.logits(step.token_ids, step.rows(), step.keep, self._adapters.begin_call)
        return self._eager.logits(step, before, embedded, self._adapters.are_hooked)

    def follow(self) -> None:
        """Compute the passes that rank 0 sends, until it sends Stop."""
        for message in self._ranks.received():
            match message:
                case Measure(rows):
                    self._eager.measure(rows)
                case Prepare(slots, max_len, kv_tokens):
                    self._allocate(slots, max_len, kv_tokens)
                case Pass():
                    self._compute(message)

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        self._ranks.send(Stop())


def _fuse(model: Any, device: torch.device, states: ModelStates | None) -> tuple[dict[str, int], Crossovers]:
    """Fuse modules; return how many of each kind, and what was measured of the kernels that compute linear layers."""
    fused = fuse(model)
    if device.type != "cpu":
        return fused, Crossovers()
    crossovers = kernel_choice.load_crossovers()
    linears = lay_out_linears(model, crossovers, _unread(states))
    return {**fused, "linears": linears + limit_exact_rows(model, crossovers)}, crossovers


def _unread(states: ModelStates | None) -> frozenset[Any]:
    """Return the linear layers whose weights the mixers of a model read without calling them."""
    return frozenset() if states is None else states.unread
