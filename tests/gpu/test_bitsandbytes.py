"""option.quantize=bitsandbytes8 and bitsandbytes4 on a real GPU, with the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rolling_batch_helpers import Engine, prompts
from tiny_models import llama_of_whole_blocks, saved_model
from transformers import AutoModelForCausalLM

from handlers.checkpoints.grouped.layers import GroupedLinear
from handlers.checkpoints.quantization import rounds_activations
from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.attention.decode_passes import CudaCapture

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)
pytest.importorskip("bitsandbytes")


def test_8_bits_do_not_round_activations(tmp_path: Path) -> None:
    plain = llama_of_whole_blocks()
    saved_model(plain, tmp_path)
    options = HuggingFaceOptions(dtype="fp32", quantize="bitsandbytes8")
    model = load_model(AutoModelForCausalLM, str(tmp_path), options)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, GroupedLinear)
    assert not rounds_activations(model)
    for name, module in plain.named_modules():
        if isinstance(model.get_submodule(name), GroupedLinear):
            module.weight.data = model.get_submodule(name).held().plain().cpu()
    engine = Engine(model, slots=4, reference=plain)
    for _ in range(2):
        answers = [engine.add(prompt, max_new_tokens=8)[1] for prompt in prompts(4)]
        engine.run()
        for prompt, answer in zip(prompts(4), answers, strict=True):
            assert answer.tokens == engine.expected(prompt, 8), answer.error
        assert engine.runner.capture(4, CudaCapture) == 3


def test_4_bits_generate_eager_and_recorded(tmp_path: Path) -> None:
    saved_model(llama_of_whole_blocks(), tmp_path)
    options = HuggingFaceOptions(dtype="bf16", quantize="bitsandbytes4")
    engine = Engine(load_model(AutoModelForCausalLM, str(tmp_path), options), slots=4)
    eager = [engine.add(prompt, max_new_tokens=8)[1] for prompt in prompts(4)]
    engine.run()
    assert engine.runner.capture(4, CudaCapture) == 3
    recorded = [engine.add(prompt, max_new_tokens=8)[1] for prompt in prompts(4)]
    engine.run()
    for one, other in zip(eager, recorded, strict=True):
        assert len(one.tokens) == len(other.tokens) == 8, one.error or other.error
