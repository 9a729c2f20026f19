"""Weights in 8-bit floats: layers and models of such, computed on the CPU as a GPU would compute them."""

from __future__ import annotations

import pytest
import torch
from rolling_batch_helpers import Engine, prompts
from tiny_models import llama_of_whole_blocks
from torch import nn

from handlers.checkpoints.fp8.layers import FP8, Fp8Linear, quantize_to_fp8, replace_linears
from handlers.checkpoints.quantization import rounds_activations
from handlers.rolling_batch.lora.targets import lora_targets
from lmi_server.contract.errors import ModelLoadError


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_as_exact_as_four_significant_bits(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    linear.weight.data[0] = 0.0
    linear.weight.data[1] *= 1e6  # each output has a scale of its own
    layer, rows = Fp8Linear.quantize(linear), torch.randn(2, 5, 64)
    expected = linear(rows).detach()
    assert layer.weight.dtype == FP8
    for output in range(1, 48):
        found, exact = layer(rows)[..., output], expected[..., output]
        assert float((found - exact).norm() / exact.norm()) < 0.1
    assert torch.equal(layer(rows)[..., 0], expected[..., 0])
    assert torch.equal(layer(torch.zeros(1, 64))[0], linear(torch.zeros(1, 64))[0])


def test_joined_layers_compute_what_they_do_alone() -> None:
    torch.manual_seed(0)
    parts = [Fp8Linear.quantize(nn.Linear(32, outputs)) for outputs in (16, 48)]
    rows = torch.randn(3, 32)
    joined = Fp8Linear.join(parts, torch.cat([part.bias for part in parts]))
    assert torch.equal(joined(rows), torch.cat([part(rows) for part in parts], 1))


def test_a_model_is_quantised_but_for_its_head_and_odd_widths(caplog: pytest.LogCaptureFixture) -> None:
    model = llama_of_whole_blocks()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Linear(mlp.down_proj.in_features, model.config.hidden_size)
    mlp.up_proj = nn.Linear(model.config.hidden_size, 17)
    head = model.get_output_embeddings()
    replace_linears(model)
    assert model.get_output_embeddings() is head
    assert isinstance(mlp.down_proj, Fp8Linear)
    assert type(mlp.up_proj) is nn.Linear
    assert "1 linear layers keep their weights" in caplog.text


def test_a_quantised_model_is_fused_and_generates_what_its_layers_compute() -> None:
    model, reference = (llama_of_whole_blocks() for _ in range(2))
    for one in (model, reference):
        replace_linears(one)
    assert rounds_activations(model)
    engine = Engine(model, reference=reference)
    assert engine.runner.fused["attentions"] == engine.runner.fused["mlps"] == model.config.num_hidden_layers
    assert set(lora_targets(reference)) <= set(lora_targets(model))
    same = 0
    for prompt in prompts(4):
        answer = engine.add(prompt, max_new_tokens=6)[1]
        engine.run()
        same += answer.tokens == engine.expected(prompt, 6)
    assert same >= 3  # the least difference may be rounded to the next of 8 bits


def test_a_model_on_the_cpu_is_refused_with_what_to_set() -> None:
    with pytest.raises(ModelLoadError, match=r"option\.quantize=fp8 is for models on a GPU; set .*=q8_0"):
        quantize_to_fp8(llama_of_whole_blocks())
