"""Runs a step plan through a transformers causal language model as one flat forward pass."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from handlers.checkpoints.placement import is_spread, main_device
from handlers.ranks.communicator import Communicator, GroupBrokenError
from handlers.rolling_batch.attention.decode_passes import (
    COMPILE_KEY,
    GRAPH_KEY,
    Capture,
    DecodePasses,
    DecodeStep,
    Step,
    checked,
    log_no_effect,
    run_once,
)
from handlers.rolling_batch.attention.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.attention.paged import (
    ChunkRows,
    SlotAttention,
    StepRows,
    UnsupportedAttentionError,
    probe_layers,
)
from handlers.rolling_batch.cpu import kernel_choice
from handlers.rolling_batch.cpu.decoder_layers import fuse_decoder_layers
from handlers.rolling_batch.cpu.decoder_model import DecoderModel
from handlers.rolling_batch.cpu.fusion import fuse
from handlers.rolling_batch.cpu.kernel_choice import ALL
from handlers.rolling_batch.cpu.linears import PackedLinear, TiledLinear
from handlers.rolling_batch.lora.layers import LoraLayers
from handlers.rolling_batch.runner.compiled_step import Compile, CompiledStep, torch_compile
from handlers.rolling_batch.runner.pass_threads import begin_pass, start_helpers
from handlers.rolling_batch.runner.step_messages import Measure, Pass, Prepare, Stop, decode, encode
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.scheduler import Chunk, Sequence, StepPlan
from handlers.rolling_batch.schedule.slots import Copy
from lmi_server.contract.errors import RequestError

_log = logging.getLogger(__name__)

_runner_ids = itertools.count()
_ROUNDED_LIMIT = 0.6
_NEAR = 10  # likeliest tokens

_ROW_STEPS = ((16, 1), (64, 4), (256, 16))  # (rows up to, padded to multiples of)
_LAST_ROW_STEP = 32


class ModelRunner:
    """A model and its KV cache. `prepare` allocates the cache, `run` computes steps.

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
    ) -> None:
        self._model = model.eval()
        self._device = main_device(model)
        self._dtype: torch.dtype = model.dtype
        self._attention_name = f"lmi_rolling_batch_{next(_runner_ids)}"
        self.vocabulary = _vocabulary(model)
        self._check = check or LoadCheck(model, max_len)
        self._attention_layers = probe_layers(model, f"{self._attention_name}_probe")
        self._communicator = communicator
        on_cpu = self._device.type == "cpu" and self._dtype in (torch.bfloat16, torch.float32)
        # The check and the probe come first: both need the modules as they were loaded.
        fuses = on_cpu and is_local and not is_spread(model)
        self._borders = kernel_choice.measured_borders() if fuses else kernel_choice.Borders()
        self.fused: dict[str, int] = fuse(model, self._borders) if fuses else {}
        self._keeps_rows = _keeps_rows(model)
        self.cache: KVCache
        self._attention: SlotAttention
        self._decoder: DecoderModel | None = None
        self._unpadded_rows = 0  # up to which passes are not padded
        self._has_helpers = False
        self._lora: LoraLayers | None = None  # None until the first adapter
        self._step: Step  # computes rows that decode, if `_passes` are used
        self._passes: DecodePasses | None = None
        self._copies_due: list[Copy] = []  # to be made before anything else of the next step

    @property
    def layers(self) -> list[LayerShape]:
        """What each attention layer keeps per token."""
        return [layer.shape for layer in self._attention_layers]

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def measure(self, rows: int) -> None:
        """Compute `rows` rows before there is a KV cache, so that the caller sees what memory a step takes."""
        self._broadcast(Measure(rows))
        self._measure(rows)

    def _measure(self, rows: int) -> None:
        with torch.inference_mode():
            self._forward([0] * rows, list(range(rows)), [rows - 1])

    def prepare(self, slots: int, max_len: int, decode_rows: int = ALL) -> None:
        """Allocate the KV cache: `slots` slots of up to `max_len` tokens. A step decodes at most `decode_rows` rows.

        Raises UnsupportedAttentionError if the logits over that cache differ from the model's own.
        """
        self._broadcast(Prepare(slots, max_len))
        self._allocate(slots, max_len, decode_rows)
        self._check.compare(self)

    def _allocate(self, slots: int, max_len: int, decode_rows: int = ALL) -> None:
        self.cache = KVCache(self.layers, slots, max_len, self._dtype)
        self._attention = SlotAttention(self.cache, self._attention_name)
        self._model.set_attn_implementation(self._attention_name)
        self._step = DecodeStep(self._model, self._attention)
        if self.fused:
            self.fused["decoder_layers"] = fuse_decoder_layers(self._model, self._attention_layers, self._attention)
            if self._keeps_rows:
                self._decoder = DecoderModel.of(self._model, self._attention, self._borders, decode_rows)
            self.fused["models"] = int(self._decoder is not None)
            self._unpadded_rows = 0 if self._decoder is None else _rows_without_onednn(self._model)
            self._borders.keep()

    def compile(self, rows: int, compiler: Compile = torch_compile) -> bool:
        """Compile decoding of up to `rows` rows; return whether steps run the compiled code."""
        if (reason := self._uncompilable()) is not None:
            log_no_effect(COMPILE_KEY, reason)
            return False
        for kept in (*self.cache.keys, *self.cache.values):
            torch._dynamo.mark_static(kept)  # only rows and columns vary
        step = CompiledStep(self._step, compiler)
        passes = checked(COMPILE_KEY, lambda: self._passes_of(step, rows, run_once), self._decoded_eagerly)
        if passes is None or step.is_eager:
            return False
        self._step, self._passes = step, passes
        _log.info("%s: decoding runs as compiled code", COMPILE_KEY)
        return True

    def capture(self, rows: int, capture: Callable[[], Capture]) -> int:
        """Record decoding of up to `rows` rows; return the number of recorded shapes, 0 if there are none."""
        if (reason := self.uncapturable()) is not None:
            log_no_effect(GRAPH_KEY, reason)
            return 0
        passes = checked(GRAPH_KEY, lambda: self._passes_of(self._step, rows, capture()), self._decoded_eagerly)
        if passes is None:
            return 0
        self._passes = passes
        _log.info("%s: decoding runs as %d CUDA graphs", GRAPH_KEY, passes.shapes)
        return passes.shapes

    def use_helpers(self) -> bool:
        """Let helper threads compute passes that need no OpenMP, if there are such; return whether there are."""
        self._has_helpers = self._decoder is not None and start_helpers()
        return self._has_helpers

    def _is_at_once(self, rows: int, chunks: list[ChunkRows]) -> bool:
        """Whether one call of a kernel computes all layers for the rows of a pass."""
        return self._decoder is not None and not chunks and not self._has_adapters() and rows <= self._decoder.max_rows

    def _has_adapters(self) -> bool:
        """Whether a row of the pass has an adapter."""
        return self._lora is not None and self._lora.is_active

    def _passes_of(self, step: Step, rows: int, capture: Capture) -> DecodePasses:
        return DecodePasses(step, rows, self.cache.max_len, self._device, capture)

    def _uncompilable(self) -> str | None:
        if self._attention.has_kernels:
            return "on the CPU a model in bf16 or fp32 runs on kernels of this project, which torch cannot compile"
        return self._divided()

    def uncapturable(self) -> str | None:
        """Return why decoding cannot be recorded as CUDA graphs, as far as that is known before."""
        return "the model is on the CPU" if self._device.type == "cpu" else self._divided()

    def _divided(self) -> str | None:
        if self._communicator is not None:
            return "the model is split over ranks"
        return "the model is spread over several devices" if is_spread(self._model) else None

    def _decoded_eagerly(self, token_ids: list[int], positions: list[int], slots: list[int]) -> torch.Tensor:
        return self._compute(Pass(token_ids, positions, slots, [], [0], [], []))

    @property
    def lora(self) -> LoraLayers:
        """The adapters of the model, once it is prepared. Raises RequestError if the model is split over ranks."""
        if self._communicator is not None:
            raise RequestError(
                "a model that is split over ranks takes no LoRA adapters; set option.tensor_parallel_degree=1"
            )
        if self._lora is None:
            pad = _padded if self._device.type == "cpu" else list
            self._lora = LoraLayers(self._model, self._keeps_rows, pad)
        return self._lora

    def run(self, plan: StepPlan, prompt_scored: set[int]) -> StepLogits:
        """Compute a step; return the logits that the sampler needs.

        `prompt_scored` has the numbers of the sequences whose prompt tokens in this step are scored as well. Raises
        GroupBrokenError if the step fails and other ranks compute it, too.
        """
        plan = self._arranged(plan)
        keep, sampled, prompt_rows = _rows_to_keep(plan, prompt_scored)
        draft_rows = _draft_rows(plan, keep)
        if self._lora is not None:
            self._lora.begin(_adapters(plan), keep)
        step = self._lay_out(plan, keep)
        self._broadcast(step)
        try:
            return StepLogits(self._compute(step)[: len(keep)], sampled, prompt_rows, draft_rows)
        except BaseException as error:
            # The other ranks have computed the step, or fail as well. Nobody knows which, so the group has to end.
            if self._communicator is not None:
                raise GroupBrokenError(f"a step failed on rank 0: {type(error).__name__}: {error}") from error
            raise

    def follow(self) -> None:
        """Compute the passes that rank 0 sends, until it sends Stop."""
        assert self._communicator is not None
        while True:
            match decode(self._communicator.receive()):
                case Measure(rows):
                    self._measure(rows)
                case Prepare(slots, max_len):
                    self._allocate(slots, max_len)
                case Pass() as step:
                    self._compute(step)
                case Stop():
                    return

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        self._broadcast(Stop())

    def _broadcast(self, message: Pass | Measure | Prepare | Stop) -> None:
        if self._communicator is not None:
            self._communicator.broadcast(encode(message))

    def _compute(self, step: Pass) -> torch.Tensor:
        """Return the logits of the rows to keep, padding last. Only rank 0 uses them."""
        self._copy(self._copies_due)
        for trim in step.trims:
            self.cache.trim(trim.slot, trim.keep)
        # Chunks that read a prefix from its source need no copy of it yet; it is made while the first tokens of these
        # sequences are on their way to the clients.
        later = {chunk.slot for chunk in step.chunks if chunk.source != chunk.slot}
        self._copies_due = [copy for copy in step.copies if copy.target in later]
        self._copy([copy for copy in step.copies if copy.target not in later])
        if self._is_recorded(step):
            assert self._passes is not None
            logits = self._passes.logits(step.token_ids, step.positions, step.slots)
            return logits if step.keep == list(range(len(logits))) else logits[step.keep]
        if self._has_helpers:
            rows, few = len(step.token_ids), self._unpadded_rows
            begin_pass(self._is_at_once(rows, step.chunks) or max(rows, len(step.keep)) <= few)
        singles = np.array(step.positions[: len(step.slots)], np.int64)
        self._attention.begin(StepRows(np.array(step.slots, np.int64), singles, step.chunks))
        with torch.inference_mode():
            return self._forward(step.token_ids, step.positions, step.keep)

    def _is_recorded(self, step: Pass) -> bool:
        """Whether a graph computes the pass: no chunks, no adapters, and no more rows than there are sequences."""
        if self._passes is None or step.chunks or len(step.slots) > self._passes.max_rows:
            return False
        return not self._has_adapters()

    def _copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            self.cache.copy(copy.source, copy.target, copy.tokens)

    def _arranged(self, plan: StepPlan) -> StepPlan:
        """Let every copy start from a slot that holds the tokens already; sort the chunks as they attend.

        A chunk may read its prefix in the source before this step's copies are made. If the source is itself the
        target of one of them, the chunk reads from the first slot of that chain. Chunks that attend row by row come
        first, next to the decode rows; then those with the same source, which form one group.
        """
        sources: dict[int, int] = {}
        for copy in plan.copies:
            sources[copy.target] = sources.get(copy.source, copy.source)
        copies = [replace(copy, source=sources[copy.target]) for copy in plan.copies]

        def order(chunk: Chunk) -> tuple[bool, int, int]:
            source = sources.get(chunk.sequence.slot, -1)
            return not self._row_by_row(chunk, source), source, chunk.start

        return replace(plan, copies=copies, prefill=sorted(plan.prefill, key=order))

    def _lay_out(self, plan: StepPlan, keep: list[int]) -> Pass:
        sources = {copy.target: copy.source for copy in plan.copies}
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence in plan.decode:
            tokens = [sequence.tokens[-1], *plan.drafts.get(sequence, ())]
            token_ids.extend(tokens)
            positions.extend(range(sequence.computed, sequence.computed + len(tokens)))
            slots.extend([sequence.slot] * len(tokens))
        chunks = []
        for chunk in plan.prefill:
            first = len(token_ids)
            token_ids.extend(chunk.sequence.tokens[chunk.start : chunk.end])
            positions.extend(range(chunk.start, chunk.end))
            slot = chunk.sequence.slot
            if self._row_by_row(chunk, sources.get(slot, -1)):
                slots.extend([slot] * (chunk.end - chunk.start))
            else:
                source = sources.get(slot, slot)
                chunks.append(ChunkRows(slot, chunk.start, chunk.end, first, len(token_ids), source))
        if self._device.type == "cpu":
            if len(token_ids) > self._unpadded_rows and not self._is_at_once(len(token_ids), chunks):
                token_ids, positions = _padded(token_ids), _padded(positions)
            if len(keep) > self._unpadded_rows:
                keep = _padded(keep)
        return Pass(token_ids, positions, slots, chunks, keep, plan.trims, plan.copies)

    def _row_by_row(self, chunk: Chunk, source: int) -> bool:
        """Whether a chunk attends row by row. Rows attend to their own slot only, so that none may have a `source`."""
        return source < 0 and self._attention.row_by_row(chunk.start, chunk.end)

    def _forward(self, token_ids: list[int], positions: list[int], keep: list[int]) -> torch.Tensor:
        ids, places = (torch.tensor([numbers], device=self._device) for numbers in (token_ids, positions))
        # Not a tensor: accelerate would move that to the first device of a model, and the rows are on its last one.
        kept = np.array(keep, np.int64)
        if self._decoder is not None and (normed := self._decoder.normed(ids, places, kept)) is not None:
            if self._has_helpers:
                begin_pass(len(kept) <= self._decoder.max_head_rows)  # the head is one operation of OpenMP's
            return self._decoder.head(normed)[0]
        inputs = {"input_ids": ids, "position_ids": places, "use_cache": False}
        if self._keeps_rows:
            return self._model(**inputs, logits_to_keep=kept).logits[0]
        return self._model(**inputs).logits[0, kept]


class LoadCheck:
    """Compares a model under the rolling batch with the model as it was loaded, on random tokens.

    The rolling batch serves any architecture that transformers has, unseen. One that keeps more than keys and values
    from token to token (a recurrent state, a convolution), or that a fused module does not fit, would generate nonsense
    without any error. So the logits of the untouched model are computed at load, and those of chunks, of a copied
    prefix and of decoding have to equal them before the model serves.
    """

    _MIN = 16  # tokens
    _DECODED = 3  # of them; the others are the prompt

    def __init__(self, model: Any, max_len: int, rounds_activations: bool = False) -> None:
        """Compute the logits of the untouched model, beyond every window that is shorter than `max_len` tokens.

        `rounds_activations`: layers of the served model round their inputs to 8 bits or fewer. Then the slightest
        difference grows from layer to layer, and equal logits cannot be asked for; see `_judge_rounded`.
        """
        self._rounds_activations = rounds_activations
        window = max((window for window in windows(model.config) if window + self._MIN <= max_len), default=0)
        lengths = sorted({self._MIN, window + self._MIN})
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # transformers' other functions leave the soft cap out
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(_vocabulary(model), (1, lengths[-1]), generator=generator)
        rows = torch.tensor([row for length in lengths for row in range(length - self._DECODED - 1, length)])
        logits = _logits(model, self._ids, rows).split(self._DECODED + 1)
        self._expected = dict(zip(lengths, logits, strict=True))

    def compare(self, runner: ModelRunner) -> None:
        """Compute a chunk in one slot, a second one that continues from it in another slot, and decode the rest there.

        Raises UnsupportedAttentionError if the logits differ by more than rounding.
        """
        length = max((length for length in self._expected if length <= runner.cache.max_len), default=0)
        if not length:
            return
        ids, prompt = self._ids[0, :length].tolist(), length - self._DECODED
        sequence = Sequence(0, ids[:prompt], prompt, self._DECODED)
        sequence.slot, other = 0, runner.cache.slots - 1
        half = prompt // 2
        runner.run(StepPlan([], [Chunk(sequence, 0, half)]), set())
        sequence.slot = other
        second = StepPlan([], [Chunk(sequence, half, prompt)], copies=[Copy(0, other, half)] if other else [])
        logits = [runner.run(second, set()).logits]
        for position in range(prompt, length):
            sequence.tokens.append(ids[position])
            sequence.computed = position
            logits.append(runner.run(StepPlan([sequence], []), set()).logits)
        for slot in {0, other}:
            runner.cache.trim(slot, 0)
        judge = self._judge_rounded if self._rounds_activations else self._judge
        judge(torch.cat(logits).float().cpu(), self._expected[length], runner.dtype)

    @staticmethod
    def _judge(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
        error = _relative_error(logits, expected)
        # Rounding to bfloat16 in every layer adds up to several per cent. Without its state a model is off by about 1.
        limit = 1e-3 if dtype == torch.float32 else 0.25
        if not error <= limit:  # NaN is an error too
            raise UnsupportedAttentionError(
                f"its logits over a KV cache differ from its own by {error:.2g} of their spread; it keeps more than"
                " keys and values from token to token"
            )

    @staticmethod
    def _judge_rounded(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
        """Judge by the error, which is above 1 for a model without its state, and by the likeliest tokens."""
        error = _relative_error(logits, expected)
        best = expected.argmax(dim=-1, keepdim=True)
        same = int((logits.argmax(dim=-1, keepdim=True) == best).sum())
        near = int((logits.topk(min(_NEAR, logits.shape[-1]), dim=-1).indices == best).any(dim=-1).sum())
        _log.info(
            "its layers round their inputs: on random tokens the logits differ by %.2g of their spread, and %d of %d"
            " likeliest tokens are the same",
            error, same, len(best),
        )  # fmt: skip
        if not error <= _ROUNDED_LIMIT or 2 * near < len(best):
            raise UnsupportedAttentionError(
                f"with rounded inputs of its layers its logits differ from its own by {error:.2g} of their spread, and"
                f" only {near} of {len(best)} likeliest tokens are among its {_NEAR} likeliest; serve it unquantised"
            )


def _relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far logits are off, as a share of the spread of the expected ones."""
    spread = expected - expected.mean(dim=-1, keepdim=True)
    return float((logits - expected).norm() / spread.norm())


def windows(config: Any) -> set[int]:
    """Return the numbers of tokens before its own that layers of the model see at most, where these are declared."""
    text_config = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    declared = getattr(text_config, "sliding_window", None)
    return {int(declared)} if declared and (kinds is None or "sliding_attention" in kinds) else set()


def _logits(model: Any, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return, in main memory, the logits that the model as it is has for some rows of a sequence.

    The model may move to another device before others are compared with them.
    """
    inputs = {"input_ids": ids.to(main_device(model)), "use_cache": False}
    with torch.inference_mode():
        if _keeps_rows(model):
            return model(**inputs, logits_to_keep=rows.numpy()).logits[0].float().cpu()
        return model(**inputs).logits[0, rows].float().cpu()


def _keeps_rows(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _vocabulary(model: Any) -> int:
    embedded: int = model.get_input_embeddings().weight.shape[0]
    return min(embedded, int(model.config.get_text_config().vocab_size))


def _padded(rows: list[int]) -> list[int]:
    """Add rows that nobody reads, so that few different numbers of rows occur.

    oneDNN compiles code for every shape that it meets, and keeps it. Without padding it would do so hundreds of times,
    in the middle of requests.
    """
    step = next((step for limit, step in _ROW_STEPS if len(rows) <= limit), _LAST_ROW_STEP)
    return rows + [0] * (-len(rows) % step)


def _rows_without_onednn(model: Any) -> int:
    """Return up to how many rows oneDNN computes no linear layer of a fused model."""
    linears = (module for module in model.modules() if isinstance(module, (TiledLinear, PackedLinear)))
    return min((linear.max_rows for linear in linears), default=0)


def _adapters(plan: StepPlan) -> list[Any]:
    """Return the adapter of each row of the pass, None for rows without one."""
    adapters = []
    for sequence in plan.decode:
        adapters += [sequence.adapter] * (1 + len(plan.drafts.get(sequence, ())))
    for chunk in plan.prefill:
        adapters += [chunk.sequence.adapter] * (chunk.end - chunk.start)
    return adapters


def _rows_to_keep(
    plan: StepPlan, prompt_scored: set[int]
) -> tuple[list[int], list[Sequence], list[tuple[Sequence, int, slice]]]:
    """Return the rows whose logits are needed, those to sample first, and which sequences they belong to."""
    keep, row = [], 0
    for sequence in plan.decode:
        keep.append(row)
        row += 1 + len(plan.drafts.get(sequence, ()))
    sampled = list(plan.decode)
    scoring = []
    for chunk in plan.prefill:
        last = row + chunk.end - chunk.start
        if chunk.completes_prompt:
            keep.append(last - 1)
            sampled.append(chunk.sequence)
        if chunk.sequence.number in prompt_scored:
            scoring.append((chunk, row, last))
        row = last
    prompt_rows = []
    for chunk, first, last in scoring:
        end = last - 1 if chunk.completes_prompt else last  # the prompt's last row scores the first output token
        prompt_rows.append((chunk.sequence, chunk.start + 1, slice(len(keep), len(keep) + end - first)))
        keep.extend(range(first, end))
    return keep, sampled, prompt_rows


def _draft_rows(plan: StepPlan, keep: list[int]) -> dict[Sequence, range]:
    """Add the rows of drafted tokens to `keep`; return which of the kept rows they are."""
    found: dict[Sequence, range] = {}
    for sequence, first in zip(plan.decode, keep[: len(plan.decode)], strict=True) if plan.drafts else ():
        drafted = len(plan.drafts.get(sequence, ()))
        if drafted:
            found[sequence] = range(len(keep), len(keep) + drafted)
            keep.extend(range(first + 1, first + 1 + drafted))
    return found
