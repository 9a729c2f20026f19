"""Linear layers with weights and activations in 8 bits (option.quantize=dynamic_int8 and smoothquant)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rolling_batch_helpers import Engine, generated, prompts
from tiny_models import byte_tokenizer, llama_of_whole_blocks, saved_model
from torch import nn

from handlers.deepspeed.int8 import DynamicInt8Linear, product_of_blocks, quantize
from handlers.deepspeed.model import load
from handlers.deepspeed.options import DeepSpeedOptions
from lmi_server.contract.errors import ModelLoadError

PROMPTS = prompts(6)
METHODS = ("dynamic_int8", "smoothquant")


def quantized(method: str, **options: Any) -> Any:
    model = llama_of_whole_blocks()
    quantize(model, byte_tokenizer(), DeepSpeedOptions(quantize=method, **options))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_rolling_batch_generates_what_the_quantised_model_does(method: str) -> None:
    engine, reference = Engine(quantized(method)), quantized(method)
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    assert [answer.tokens for answer in answers] == [generated(reference, prompt, 12) for prompt in PROMPTS]
    assert isinstance(reference.model.layers[0].mlp.down_proj, DynamicInt8Linear)
    assert type(reference.lm_head) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_computed_as_it_is_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = DynamicInt8Linear.quantize(nn.Linear(96, 40), None)
    rows = torch.randn((1, 20, 96), generator=generator).to(dtype)
    together = layer(rows)
    rows[0, 1:] *= 50
    assert torch.equal(layer(rows)[0, 0], together[0, 0])
    assert torch.equal(layer(rows[:, :1])[0, 0], together[0, 0])


def test_smoothing_makes_up_for_inputs_with_outliers() -> None:
    generator = torch.Generator().manual_seed(2)
    linear = nn.Linear(64, 64, bias=False).requires_grad_(False)
    rows = torch.randn((32, 64), generator=generator)
    rows[:, 5] *= 80
    peaks, weights = rows.abs().amax(0), linear.weight.detach().abs().amax(0)
    errors = []
    for smoothing in (None, (peaks / weights).sqrt()):
        computed = DynamicInt8Linear.quantize(linear, smoothing)(rows)
        errors.append(float((computed - linear(rows)).norm() / linear(rows).norm()))
    assert errors[1] < errors[0] / 3


def test_alpha_moves_more_or_less_into_the_weights() -> None:
    factors = [
        quantized("smoothquant", smoothquant_alpha=alpha).model.layers[0].mlp.gate_proj.smoothing
        for alpha in (0.2, 0.5, 0.5, 0.8)
    ]
    assert torch.equal(factors[1], factors[2])
    spreads = [float(factor.max() / factor.min()) for factor in (factors[0], factors[1], factors[3])]
    assert len(set(spreads)) == 3


@pytest.mark.parametrize("method", METHODS)
def test_the_details_report_the_saved_memory(method: str, tmp_path: Path) -> None:
    saved_model(llama_of_whole_blocks(), tmp_path)
    details = load(str(tmp_path), DeepSpeedOptions(quantize=method, dtype="fp32")).details
    assert details["quantization"] == method
    assert details["weights_mib"] < 0.6 * details["unquantized_weights_mib"]


@pytest.mark.parametrize("inputs", [8, 12, 96])
@pytest.mark.parametrize("outputs", [5, 40])
@pytest.mark.parametrize("count", [1, 17, 40])
def test_the_product_for_a_gpu_is_that_of_the_cpu(count: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, weight = (
        torch.randint(-127, 128, (length, inputs), dtype=torch.int8, generator=generator) for length in (count, outputs)
    )
    assert torch.equal(product_of_blocks(rows, weight).long(), rows.long() @ weight.long().t())


def test_a_model_that_reads_no_texts_is_not_measured_with_texts() -> None:
    with pytest.raises(ModelLoadError, match="measures the model on sentences, but it has no tokenizer"):
        quantize(llama_of_whole_blocks(), None, DeepSpeedOptions(quantize="smoothquant"))


def test_an_empty_part_of_a_layer_gives_nothing() -> None:
    linear = nn.Linear(4, 8, bias=False)
    linear.weight = nn.Parameter(torch.empty(8, 0))
    layer = DynamicInt8Linear.quantize(linear, None)
    assert torch.equal(layer(torch.zeros(1, 3, 0)), torch.zeros(1, 3, 8))
