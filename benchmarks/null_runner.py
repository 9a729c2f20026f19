"""A model runner that computes nothing, and a handler that serves it: what is left is the host's own work.

`NullRunner` lays each step out as the real runner does, then returns logits that were drawn once. Its vocabulary is
small, because on a GPU the choice of a token is the GPU's work, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


class NullRunner:
    """Returns at once: fixed logits, (rows, `WIDTH`) float32, others in each step."""

    scores_prompts = False

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary  # of prompts; it generates tokens below `WIDTH` only
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(rows + _TURNS, WIDTH, generator=generator)
        self._step = 0

    @property
    def lora(self) -> LoraLayers:
        raise RequestError("a null runner takes no adapters")

    def run(self, plan: StepPlan, prompt_scored: set[int], before: torch.Tensor | None = None) -> StepLogits:
        kept = self.laid_out(plan)
        self._step = (self._step + 1) % _TURNS
        logits = self._logits[self._step : self._step + len(kept.rows)]
        return StepLogits(logits, kept.sampled, kept.prompt_rows, kept.draft_rows)

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


def null_engine(tokenizer: Any, rows: int) -> RollingBatchEngine:
    """Return an engine with room for `rows` sequences, whose steps compute nothing."""
    limits = SchedulerLimits(rows, rows * MAX_LEN, 4096, 4096, rows)
    return RollingBatchEngine(NullRunner(rows, len(tokenizer)), Scheduler(limits), tokenizer, frozenset({0}), MAX_LEN)


class NullModelHandler(SchedulingHandler):
    """Serves a `null_engine` with the tokenizer of the model's directory."""

    def load_engine(self, model_dir: str, options: Any) -> LoadedEngine:
        tokenizer = AutoTokenizer.from_pretrained(Path(model_dir))
        rows = options.max_rolling_batch_size
        return LoadedEngine(null_engine(tokenizer, rows), PromptEncoder(tokenizer), MAX_LEN, rows * MAX_LEN)

    def window(self, options: Any) -> int:
        return int(options.schedule_window)
