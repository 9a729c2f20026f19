"""Runs a step plan through a transformers causal language model as one flat forward pass."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.placement import is_spread, main_device
from handlers.ranks.communicator import Communicator
from handlers.rolling_batch.attention.decode_passes import COMPILE_KEY, GRAPH_KEY, Capture, DecodeStep, log_no_effect
from handlers.rolling_batch.attention.frequencies import RowFrequencies
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape, kept_type, no_packed_cache
from handlers.rolling_batch.attention.paged import SlotAttention
from handlers.rolling_batch.attention.pass_inputs import PassInputs
from handlers.rolling_batch.attention.probe import AttentionLayer, UnsupportedAttentionError, probe_layers
from handlers.rolling_batch.attention.rows import ChunkRows
from handlers.rolling_batch.cpu import kernel_choice
from handlers.rolling_batch.cpu.block_linears import limit_exact_rows
from handlers.rolling_batch.cpu.decoder_model import DecoderModel
from handlers.rolling_batch.cpu.kernel_choice import ALL
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear, lay_out_linears
from handlers.rolling_batch.cpu.pass_threads import begin_pass, start_helpers
from handlers.rolling_batch.device_arrays import known_tokens, upload
from handlers.rolling_batch.fused.decoder_layers import fuse_decoder_layers
from handlers.rolling_batch.fused.modules import fuse
from handlers.rolling_batch.fused.row_kernels import is_fusible
from handlers.rolling_batch.images.prompt import EmbeddedRows, embedded_rows
from handlers.rolling_batch.lora.layers import LoraLayers
from handlers.rolling_batch.lora.pass_adapters import PassAdapters
from handlers.rolling_batch.pages.attention import PageAttention
from handlers.rolling_batch.pages.cache import PagedCache
from handlers.rolling_batch.pages.choice import page_size
from handlers.rolling_batch.runner.compiled_step import Compile, torch_compile
from handlers.rolling_batch.runner.load_check import LoadCheck, keeps_rows, vocabulary_of
from handlers.rolling_batch.runner.recorded_decoding import RecordedDecoding
from handlers.rolling_batch.runner.step_layout import RowByRow, arrange, lay_out, pad_rows, rows_to_keep
from handlers.rolling_batch.runner.step_memory import StepMemory
from handlers.rolling_batch.runner.step_messages import Measure, Pass, Prepare, Ranks, Stop
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.frequencies import FrequencyBorder
from handlers.rolling_batch.schedule.plan import StepPlan
from handlers.rolling_batch.sequences.passes import CODE_ERRORS, SequencePasses
from handlers.rolling_batch.states.model_states import ModelStates
from handlers.rolling_batch.states.probe import keeps_states
from lmi_server.contract.errors import RequestError, first_line

logger = logging.getLogger(__name__)

_runner_ids = itertools.count()


class ModelRunner:
    """A model and its KV cache. `prepare` allocates the cache, `run` computes steps.

    `page` is how many tokens a page of the cache has; 0 for slots, None to choose by device. Models with states, those
    whose layers are counted as they are called, and those whose passes are not flat have slots in any case.
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
        self._attention_name = f"lmi_rolling_batch_{next(_runner_ids)}"
        self.vocabulary = vocabulary_of(model)
        self._check = check or LoadCheck(model, max_len)
        self._inputs = PassInputs(model)
        self.frequencies: RowFrequencies | None = None  # None: they are the same for texts of every length
        self._ranks = Ranks(communicator)
        self._is_spread = is_spread(model)
        self._sequences: SequencePasses | None = None  # None: passes are flat
        self._implementation: str = model.config._attn_implementation
        self._attention_layers: list[AttentionLayer] = []  # of flat passes
        self.states: ModelStates | None = None
        try:
            probe_name = f"{self._attention_name}_probe"
            self._attention_layers = probe_layers(model, probe_name, self._inputs, keeps_states(model))
            self.states = ModelStates.from_model(model, self._inputs, self.device)
        except CODE_ERRORS as error:
            self._leave_flat_passes(error)
        if self.states is not None and (reason := self._why_divided()) is not None:
            raise UnsupportedAttentionError(f"its layers keep states, and {reason}")
        on_cpu = self.device.type == "cpu"
        # The check and the probe come first: both need the modules as they were loaded.
        fuses = is_fusible(self.device, self.dtype) and is_local and not is_spread(model)
        self._crossovers = kernel_choice.load_crossovers() if fuses and on_cpu else kernel_choice.Crossovers()
        self.fused: dict[str, int] = fuse(model) if fuses else {}
        if fuses and on_cpu:
            spared = frozenset[Any]() if self.states is None else self.states.unread
            self.fused["linears"] = lay_out_linears(model, self._crossovers, spared)
            self.fused["linears"] += limit_exact_rows(model, self._crossovers)
        self._keeps_rows = keeps_rows(model)
        self.page = page_size(self.layers, self.dtype) if page is None else page
        if self._in_call_order or self._sequences is not None:
            self.page = 0
        self.cache: KVCache | PagedCache
        self._memory: StepMemory
        self._attention: SlotAttention | PageAttention
        self._decoder: DecoderModel | None = None
        self._unpadded_rows = 0  # up to which passes are not padded
        self._has_helpers = False
        self._adapters = PassAdapters()
        self._recorded: RecordedDecoding | None = None  # None: passes are not flat

    @property
    def layers(self) -> list[LayerShape]:
        """What each attention layer keeps per token, as elements of `kept_dtype`."""
        if self._sequences is not None:
            return self._sequences.shapes
        shapes = [layer.shape for layer in self._attention_layers]
        return shapes if self._kv_dtype is None else [shape.packed() for shape in shapes]

    def _leave_flat_passes(self, reason: Exception) -> None:
        """Compute passes sequence by sequence, if the model can; raise `reason` otherwise."""
        if self._ranks.are_several or self._sequences is not None or self.frequencies is not None:
            raise reason
        if self._kv_dtype is not None:
            raise no_packed_cache(
                self._kv_dtype, f"the model runs sequence by sequence: {first_line(reason)}"
            ) from reason
        try:
            self._sequences = SequencePasses(self._model, self._implementation)
        except CODE_ERRORS as error:
            raise reason from error
        logger.info("%s runs sequence by sequence: %s", type(self._model).__name__, first_line(reason))

    def change_frequencies(self, max_len: int) -> None:
        """Give each row the rotary embeddings for its length, if these change within `max_len` tokens."""
        if self._sequences is None and self.states is None and not self._ranks.are_several:
            self.frequencies = RowFrequencies.from_model(self._model, max_len)
        if self.frequencies is not None:
            self.page = 0

    def measure(self, rows: int) -> None:
        """Compute `rows` rows before there is a KV cache, for the caller to see the memory of a step."""
        self._ranks.send(Measure(rows))
        self._measure(rows)

    def _measure(self, rows: int) -> None:
        with torch.inference_mode():
            if self._sequences is not None:
                self._sequences.measure(rows)
            else:
                self._forward(upload([0] * rows, self.device), list(range(rows)), [rows - 1])

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
            self.states.allocate(state_rows)
        self._allocate(slots, max_len, kv_tokens, decode_rows)
        try:
            self._check.compare(self)
        except UnsupportedAttentionError as error:
            if self.fused.get("decoder_layers") or self.states is not None:
                raise
            self._leave_flat_passes(error)
            if isinstance(self.cache, PagedCache):
                self.cache.free()
                self.page = 0
                return
            self._allocate(slots, max_len, kv_tokens, decode_rows)
            self._check.compare(self)
        if self._sequences is not None:
            self._sequences.together = self._check.computes_together(self)

    def _allocate(self, slots: int, max_len: int, kv_tokens: int, decode_rows: int = ALL) -> None:
        if self._sequences is not None:
            self.cache = KVCache(self.layers, slots, max_len, self.dtype)
            self._memory = StepMemory(self.cache, reads_sources=False)
            self._sequences.use(self.cache)
            return
        terms = [layer.terms for layer in self._attention_layers]
        if self.page:
            self.cache = PagedCache(self.layers, slots, max_len, kv_tokens, self.page, self.dtype)
            self._attention = PageAttention(self.cache, self._attention_name, terms)
        else:
            self.cache = KVCache(self.layers, slots, max_len, self.kept_dtype)
            kind = (self._in_call_order, self.dtype)
            self._attention = SlotAttention(self.cache, self._attention_name, terms, *kind)
        self._memory = StepMemory(self.cache, reads_sources=True)
        self._model.set_attn_implementation(self._attention_name)
        step = DecodeStep(self._model, self._attention, self._inputs)
        self._recorded = RecordedDecoding(step, self.cache, self.device)
        if self.fused and not self._in_call_order:
            self.fused["decoder_layers"] = fuse_decoder_layers(self._model, self._attention_layers, self._attention)
            at_once = self._keeps_rows and self.device.type == "cpu" and self.frequencies is None
            if at_once and isinstance(self._attention, SlotAttention):
                self._decoder = DecoderModel.from_model(self._model, self._attention, self._crossovers, decode_rows)
            self.fused["models"] = int(self._decoder is not None)
            self._unpadded_rows = 0 if self._decoder is None else _rows_without_onednn(self._model)
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
        self._has_helpers = self._decoder is not None and start_helpers()
        return self._has_helpers

    def _is_at_once(self, rows: int, chunks: list[ChunkRows]) -> bool:
        """Whether one call of a kernel computes all layers for the rows of a pass."""
        return (
            self._decoder is not None
            and not chunks
            and not self._adapters.are_hooked
            and rows <= self._decoder.max_rows
        )

    @property
    def _in_call_order(self) -> bool:
        """Whether the layers that attend are counted as they are called, because their numbers have gaps or repeat."""
        numbers = [getattr(layer.module, "layer_idx", None) for layer in self._attention_layers]
        return self.states is not None or numbers != list(range(len(numbers)))

    def _uncompilable(self) -> str | None:
        if self._sequences is None and self._attention.has_kernels:
            return "on the CPU a model in bf16 or fp32 runs on kernels of this project, which torch cannot compile"
        return self._why_divided() if self.states is None else "its layers keep states"

    def uncapturable(self) -> str | None:
        """Return why decoding cannot be recorded as CUDA graphs, as far as that is known before."""
        if self.states is not None:
            return "its layers keep states"
        return "the model is on the CPU" if self.device.type == "cpu" else self._why_divided()

    @property
    def border(self) -> FrequencyBorder | None:
        """Where rotary embeddings change with the length; None if they do not."""
        rows = self.frequencies
        return None if rows is None else FrequencyBorder(rows.length, rows.is_step, rows.recomputes)

    def _why_divided(self) -> str | None:
        if self.frequencies is not None:
            return "its rotary embeddings change with the length"
        if self._ranks.are_several:
            return "the model is split over ranks"
        if self._sequences is not None:
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
            unread = frozenset[Any]() if self.states is None else self.states.unread
            self._adapters.lora = lora = LoraLayers(self._model, self._keeps_rows, pad, unread)
            lora.bank = None if self._recorded is None else self._recorded.new_bank()
            if self.states is not None:
                self.states.on_rows(lora.enter)
        return self._adapters.lora

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        """Compute a step; return the logits that the sampler needs. On a GPU it is computed when this has returned.

        `prompt_scored` has the numbers of the sequences whose prompt tokens in this step are scored as well. Raises
        GroupBrokenError if the step fails and other ranks compute it, too.
        """
        row_by_row = self._row_by_row
        plan = arrange(plan, row_by_row)
        kept = rows_to_keep(plan, prompt_scored)
        self._adapters.begin(plan, kept.rows)
        step = self._pad(lay_out(plan, kept.rows, row_by_row))
        if self.frequencies is not None:
            self.frequencies.begin([] if self.border is None else self.border.lengths(plan))
        embedded = embedded_rows(plan, len(step.token_ids))
        self._ranks.send(step)
        with self._ranks.in_step():
            logits = self._compute(step, before, embedded)[: len(kept.rows)]
        return StepLogits(logits, kept.sampled, kept.prompt_rows, kept.draft_rows)

    @property
    def _row_by_row(self) -> RowByRow:
        """Which chunks attend row by row: none of sequences that are computed as such, in attention or in a mixer."""
        if self.states is not None or self._sequences is not None:
            return _never
        return self._attention.row_by_row

    def _pad(self, step: Pass) -> Pass:
        """Add rows that nothing reads to a pass of oneDNN."""
        if self.device.type != "cpu" or self._sequences is not None:
            return step
        rows = len(step.token_ids)
        if rows > self._unpadded_rows and not self._is_at_once(rows, step.chunks):
            step = replace(step, token_ids=pad_rows(step.token_ids), positions=pad_rows(step.positions))
        return replace(step, keep=pad_rows(step.keep)) if len(step.keep) > self._unpadded_rows else step

    def follow(self) -> None:
        """Compute the passes that rank 0 sends, until it sends Stop."""
        for message in self._ranks.received():
            match message:
                case Measure(rows):
                    self._measure(rows)
                case Prepare(slots, max_len, kv_tokens):
                    self._allocate(slots, max_len, kv_tokens)
                case Pass():
                    self._compute(message)

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        self._ranks.send(Stop())

    def _compute(
        self, step: Pass, before: torch.Tensor | None = None, embedded: EmbeddedRows | None = None
    ) -> torch.Tensor:
        """Return the logits of the rows to keep, padding last. Only rank 0 uses them."""
        self._memory.arrange(step)
        if embedded is None and self._recorded is not None:
            logits = self._recorded.logits(step, before, self._adapters)
            if logits is not None:
                return logits
        if self._sequences is not None:
            return self._sequences.logits(step.token_ids, step.rows(), step.keep, self._adapters.begin_call)
        if self._has_helpers:
            rows, few = len(step.token_ids), self._unpadded_rows
            begin_pass(self._is_at_once(rows, step.chunks) or max(rows, len(step.keep)) <= few)
        self._attention.begin(step.rows())
        with torch.inference_mode():
            ids = known_tokens(upload(step.token_ids, self.device), before)
            if self.states is None:
                return self._forward(ids, step.positions, step.keep, embedded)
            self.states.begin(step.slots, step.positions, step.chunks, step.states)
            logits = self._forward(ids, step.positions, step.keep, embedded)
            self.states.end(step.states)
            return logits

    def _forward(
        self, token_ids: torch.Tensor, positions: list[int], keep: list[int], embedded: EmbeddedRows | None = None
    ) -> torch.Tensor:
        ids, places = token_ids[None], upload(positions, self.device)[None]
        # accelerate moves tensors to the first device of a model; the rows are on its last one.
        kept = np.array(keep, np.int64) if self._is_spread or self.device.type == "cpu" else upload(keep, self.device)
        if embedded is not None:
            return self._embedded(embedded, ids, places, kept)
        if self._decoder is not None and (normed := self._decoder.normed(ids, places, kept)) is not None:
            if self._has_helpers:
                begin_pass(len(kept) <= self._decoder.max_head_rows)  # the head is one operation of OpenMP's
            return self._decoder.head(normed)[0]
        inputs = self._inputs(ids, places)
        if self._keeps_rows:
            return self._model(**inputs, logits_to_keep=kept).logits[0]
        return self._model(**inputs).logits[0, kept]

    def _embedded(self, embedded: EmbeddedRows, ids: torch.Tensor, places: torch.Tensor, kept: Any) -> torch.Tensor:
        """Return the logits of a pass in which sequences have images."""
        if embedded.positions is not None:
            places = upload(embedded.positions, self.device)[:, None]
        inputs = embedded.inputs(ids, self._model)
        return self._model(**inputs, position_ids=places, use_cache=False, logits_to_keep=kept).logits[0]


def _rows_without_onednn(model: Any) -> int:
    """Return up to how many rows oneDNN computes no linear layer of a fused model."""
    linears = (module for module in model.modules() if isinstance(module, (TiledLinear, PackedLinear, BlockLinear)))
    return min((linear.max_rows for linear in linears), default=0)


def _never(_start: int, _end: int) -> bool:
    """Say that no chunk attends row by row."""
    return False
