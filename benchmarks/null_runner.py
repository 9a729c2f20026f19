"""A model runner that computes nothing, and a handler that serves it: what is left is the host's own work.

`NullRunner` lays each step out as the real runner does, then returns logits that were drawn once. Its vocabulary is
small, because on a GPU the choice of a token is the GPU's work, too. On a CPU it is the host's, and the host's code and
data have to come from memory in every step: the weights that a step reads have taken their places in the caches.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from handlers.generation.prompts import PromptEncoder
from handlers.rolling_batch.engine import RollingBatchEngine
from handlers.rolling_batch.engine_loading import LoadedEngine
from handlers.rolling_batch.handler import SchedulingHandler
from handlers.rolling_batch.lora.layers import LoraLayers
from handlers.rolling_batch.runner.step_layout import arrange, lay_out, rows_to_keep
from handlers.rolling_batch.runner.step_runner import StepLogits
from handlers.rolling_batch.schedule.plan import StepPlan
from handlers.rolling_batch.schedule.scheduler import Scheduler, SchedulerLimits
from lmi_server.contract.errors import RequestError

MAX_LEN = 4096  # tokens of prompt and output
WIDTH = 2048  # logits of a row
_TURNS = 61  # steps after which the logits repeat


class Steps(NamedTuple):
    """What steps return and do: logits of `width` and a type; they read `swept` bytes, as those of weights."""

    width: int = WIDTH
    dtype: torch.dtype = torch.float32
    swept: int = 0


ON_GPU, ON_CPU = Steps(), Steps(49152, torch.bfloat16, 2**26)


class NullRunner:
    """Returns at once: fixed logits, (rows, width), others in each step. `swept_s` is the time that sweeps took."""

    scores_prompts = False

    def __init__(self, rows: int, vocabulary: int, steps: Steps = ON_GPU) -> None:
        self.vocabulary = vocabulary  # of prompts; it generates tokens below `width` only
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(rows + _TURNS, steps.width, generator=generator).to(steps.dtype)
        self._step = 0
        self._memory = np.ones(steps.swept // 8, np.int64)
        self.swept_s = 0.0

    @property
    def lora(self) -> LoraLayers:
        raise RequestError("a null runner takes no adapters")

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        kept = self.laid_out(plan)
        self._sweep()
        self._step = (self._step + 1) % _TURNS
        logits = self._logits[self._step : self._step + len(kept.rows)]
        return StepLogits(logits, kept.sampled, kept.prompt_rows, kept.draft_rows)

    def _sweep(self) -> None:
        if len(self._memory):
            began = time.thread_time()
            self._memory.sum()
            self.swept_s += time.thread_time() - began

    def laid_out(self, plan: StepPlan) -> Any:
        """Lay the step out as the real runner does, and make the tensors that a model takes."""
        plan = arrange(plan, _row_by_row)
        kept = rows_to_keep(plan, set())
        step = lay_out(plan, kept.rows, _row_by_row)
        torch.tensor([step.token_ids]), torch.tensor([step.positions]), torch.tensor(step.slots)
        return kept

    def stop(self) -> None:
        """Nothing is left to stop."""


def _row_by_row(start: int, end: int) -> bool:
    return (end - start) * end <= 64


def null_engine(tokenizer: Any, runner: NullRunner, rows: int) -> RollingBatchEngine:
    """Return an engine with room for `rows` sequences, whose steps compute nothing."""
    limits = SchedulerLimits(rows, rows * MAX_LEN, 4096, 4096, rows)
    return RollingBatchEngine(runner, Scheduler(limits), tokenizer, frozenset({0}), MAX_LEN)


class NullModelHandler(SchedulingHandler):
    """Serves a `null_engine` with the tokenizer of the model's directory."""

    def load_engine(self, model_dir: str, options: Any) -> LoadedEngine:
        tokenizer = AutoTokenizer.from_pretrained(Path(model_dir))
        rows = options.max_rolling_batch_size
        engine = null_engine(tokenizer, NullRunner(rows, len(tokenizer)), rows)
        return LoadedEngine(engine, PromptEncoder(tokenizer), MAX_LEN, rows * MAX_LEN)

    def window(self, options: Any) -> int:
        return int(options.schedule_window)
