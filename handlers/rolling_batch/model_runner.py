"""Runs a step plan through a transformers causal language model as one flat forward pass."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from handlers.rolling_batch.attention import ChunkRows, SlotAttention, StepRows, probe_layers
from handlers.rolling_batch.fusion import fuse, fuse_decoder_layers
from handlers.rolling_batch.kv_cache import KVCache, LayerShape
from handlers.rolling_batch.scheduler import Chunk, Sequence, StepPlan

_runner_ids = itertools.count()

_ROW_STEPS = ((16, 1), (64, 4), (256, 16))  # up to so many rows, in multiples of
_LAST_ROW_STEP = 32


@dataclass(frozen=True)
class StepLogits:
    """Logits of a step, (rows, vocabulary): first one row per sequence of `sampled`, whose next token they choose.

    `prompt_rows` gives, for a sequence that reports its prompt's log probabilities, the first position of its chunk
    and the rows that score the chunk's tokens from there on.
    """

    logits: torch.Tensor
    sampled: list[Sequence]
    prompt_rows: list[tuple[Sequence, int, slice]]


class ModelRunner:
    """A model and its KV cache. `prepare` decides the cache's size; `run` computes steps."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._attention_name = f"lmi_rolling_batch_{next(_runner_ids)}"
        self._attention_layers = probe_layers(model, f"{self._attention_name}_probe")
        on_cpu = self._device.type == "cpu" and self._dtype in (torch.bfloat16, torch.float32)
        self.fused: dict[str, int] = fuse(model) if on_cpu else {}
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.cache: KVCache
        self._attention: SlotAttention

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

    def prepare(self, slots: int, max_len: int, kv_tokens: int) -> None:
        """Allocate the KV cache for `slots` sequences of up to `max_len` tokens, `kv_tokens` in all."""
        self.cache = KVCache(self.layers, slots, max_len, kv_tokens, self._dtype, self._device)
        self._attention = SlotAttention(self.cache, self._attention_name)
        self._model.set_attn_implementation(self._attention_name)
        if self.fused:
            self.fused["decoder_layers"] = fuse_decoder_layers(self._model, self._attention_layers, self._attention)

    def run(self, plan: StepPlan, prompt_scored: set[str]) -> StepLogits:
        """Compute the plan's tokens; return the logits that the sampler needs.

        `prompt_scored` names the requests whose prompt tokens are scored as well.
        """
        plan = StepPlan(plan.decode, sorted(plan.prefill, key=lambda chunk: not self._row_by_row(chunk)))
        rows, token_ids, positions = self._lay_out(plan)
        keep, sampled, prompt_rows = _rows_to_keep(plan, prompt_scored)
        self._attention.begin(rows)
        with torch.inference_mode():
            logits = self._forward(token_ids, positions, keep)
        return StepLogits(logits, sampled, prompt_rows)

    def _lay_out(self, plan: StepPlan) -> tuple[StepRows, list[int], list[int]]:
        token_ids = [sequence.tokens[-1] for sequence in plan.decode]
        positions = [sequence.computed for sequence in plan.decode]
        slots = [sequence.slot for sequence in plan.decode]
        chunks = []
        for chunk in plan.prefill:
            first = len(token_ids)
            token_ids.extend(chunk.sequence.tokens[chunk.start : chunk.end])
            positions.extend(range(chunk.start, chunk.end))
            if self._row_by_row(chunk):
                slots.extend([chunk.sequence.slot] * (chunk.end - chunk.start))
            else:
                chunks.append(ChunkRows(chunk.sequence.slot, chunk.start, chunk.end, first, len(token_ids)))
        single = StepRows(np.array(slots, np.int64), np.array(positions[: len(slots)], np.int64), chunks)
        return single, token_ids, positions

    def _row_by_row(self, chunk: Chunk) -> bool:
        return self._attention.row_by_row(chunk.start, chunk.end)

    def _forward(self, token_ids: list[int], positions: list[int], keep: list[int]) -> torch.Tensor:
        count = len(keep)
        if self._device.type == "cpu":
            token_ids, positions, keep = _padded(token_ids), _padded(positions), _padded(keep)
        inputs = {
            "input_ids": torch.tensor([token_ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
        }
        kept = torch.tensor(keep, dtype=torch.long, device=self._device)
        if self._keeps_rows:
            return self._model(**inputs, logits_to_keep=kept).logits[0, :count]
        return self._model(**inputs).logits[0, kept[:count]]


def _padded(rows: list[int]) -> list[int]:
    """Add rows that nobody reads, so that few different row counts occur.

    oneDNN compiles and keeps code for every shape that it meets; without this it would do so for hundreds of counts.
    """
    step = next((step for limit, step in _ROW_STEPS if len(rows) <= limit), _LAST_ROW_STEP)
    return rows + [0] * (-len(rows) % step)


def _rows_to_keep(
    plan: StepPlan, prompt_scored: set[str]
) -> tuple[list[int], list[Sequence], list[tuple[Sequence, int, slice]]]:
    """Rows of the pass whose logits are needed: the sampled ones first, then those that score prompt tokens."""
    keep = list(range(len(plan.decode)))
    sampled = list(plan.decode)
    row = len(keep)
    scoring = []
    for chunk in plan.prefill:
        last = row + chunk.end - chunk.start
        if chunk.completes_prompt:
            keep.append(last - 1)
            sampled.append(chunk.sequence)
        if chunk.sequence.request_id in prompt_scored:
            scoring.append((chunk, row, last))
        row = last
    prompt_rows = []
    for chunk, first, last in scoring:
        end = last - 1 if chunk.completes_prompt else last  # the prompt's last row scores the first output token
        prompt_rows.append((chunk.sequence, chunk.start + 1, slice(len(keep), len(keep) + end - first)))
        keep.extend(range(first, end))
    return keep, sampled, prompt_rows
