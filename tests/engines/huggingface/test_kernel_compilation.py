"""The small model that kernels are compiled with needs all of them, whatever its random weights are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rolling_batch_helpers import tiles_for_any_rows
from transformers import AutoModelForCausalLM

from handlers.huggingface.kernel_compilation import save_small_llama
from handlers.rolling_batch.cpu import kernel_choice
from handlers.rolling_batch.runner.model_runner import ModelRunner

pytestmark = pytest.mark.slow


def test_every_part_of_the_small_model_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "load_crossovers", tiles_for_any_rows)
    for seed in (0, 3, 7):
        torch.manual_seed(seed)
        save_small_llama(tmp_path, "bfloat16")
        runner = ModelRunner(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), 512)
        runner.prepare(4, 512)
        assert (runner.fused["decoder_layers"], runner.fused["models"]) == (2, 1), f"seed {seed}"
