"""Weights in blocks of few bits: what is stored, what the kernels compute with it, and a model of such layers."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import mixed_gguf, random_blocks
from rolling_batch_helpers import Engine, generated_like, prompts
from tiny_models import llama_of_whole_blocks, random_model, saved_model, tiny_model
from transformers import AutoModelForCausalLM, MambaConfig, WavLMConfig, WavLMModel

from handlers.checkpoints.blocks.formats import FORMATS, StoredWeight
from handlers.checkpoints.blocks.gguf_weights import keep_stored
from handlers.checkpoints.blocks.layers import BlockLinear
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.checkpoints.blocks.rounding import quantize
from handlers.checkpoints.transformers_loading import load_model
from handlers.cpu_kernels.arrays import as_numpy
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS
from handlers.huggingface.options import HuggingFaceOptions


@functools.cache
def known(name: str, outputs: int, inputs: int) -> tuple[StoredWeight, torch.Tensor]:
    """Return random blocks, and the weight that they hold in float64."""
    stored = random_blocks(name, outputs, inputs)
    return stored, reference(stored).double()


def reference(stored: StoredWeight) -> torch.Tensor:
    if stored.format not in FORMATS.values():  # which ggml does not have
        return stored.numbers().weight()
    kind = gguf.GGMLQuantizationType[stored.format.name.upper()]
    return torch.from_numpy(gguf.dequantize(stored.raw.contiguous().numpy(), kind))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_ggml_does(name: str) -> None:
    stored = random_blocks(name, 5, 768)
    torch.testing.assert_close(stored.numbers().weight(), reference(stored), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stored.rows(torch.tensor([3, 0])), reference(stored)[[3, 0]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*FORMATS, "q4_zero"])
def test_a_weight_of_one_output_and_one_block_is_read_as_in_a_larger_one(name: str) -> None:
    larger = random_blocks(name, 3, 512)
    alone = StoredWeight(larger.format, larger.raw[1:2, : larger.format.block_bytes])
    expected = larger.numbers().weight()[1:2, : larger.format.block_inputs]
    assert torch.equal(alone.numbers().weight(), expected)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_a_weight_is_quantised_as_ggml_does(name: str) -> None:
    weight = torch.randn((7, 128), generator=torch.Generator().manual_seed(0))
    weight[2, 32:64] = 0
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(quantize(weight, name).raw.numpy(), expected)


@pytest.mark.parametrize("kind", ["q4_k", "int8"])
def test_a_quantised_weight_is_off_by_half_a_step(kind: str) -> None:
    weight = torch.randn((7, 512), generator=torch.Generator().manual_seed(0)) + 0.3
    weight[2, 32:64] = 0
    weight[3] = 0
    weight[4] = weight[4].abs()
    stored = quantize(weight, kind)
    assert torch.equal(stored.numbers().weight(), reference(stored))
    rows = weight.view(7, -1, 256) if kind == "q4_k" else weight.view(7, 1, 512)
    step = (rows.amax(2) - rows.amin(2)) / 15 if kind == "q4_k" else rows.abs().amax(2) / 127
    # Of q4_k, a scale and a minimum are off as well, by half of 1 / 63 of the greatest of a super-block.
    allowed = step * (0.9 if kind == "q4_k" else 0.51)
    assert bool(((stored.numbers().weight().view_as(rows) - rows).abs().amax(2) <= allowed).all())


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 33, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 1), (512, 100), (2304, 130)])
@pytest.mark.parametrize("name", [*FORMATS, "q4_zero"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_multiplies_by_what_is_stored(
    rows: int, inputs: int, outputs: int, name: str, dtype: torch.dtype
) -> None:
    stored, weight = known(name, outputs, inputs)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(dtype) if outputs == 100 else None
    hidden = torch.randn((1, rows, inputs), generator=torch.Generator().manual_seed(1)).to(dtype)
    added = 0.0 if bias is None else bias.double()
    expected = hidden.double() @ weight.T + added
    layer = BlockLinear.from_stored(stored, bias, dtype)
    size = hidden.double().abs() @ weight.abs().T  # of what is added up
    rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0.0
    # Inputs in bfloat16 may be multiplied as integers of 16 bits, and what is unpacked may be rounded to bfloat16.
    errors = (1e-5, 2**-8) if dtype == torch.bfloat16 else (1e-6, 1e-6)
    for exact_rows, error in zip((rows, 0), errors, strict=True):
        layer.laid[EXACT_ROWS] = exact_rows
        assert bool(((layer(hidden).double() - expected).abs() <= rounding + error * size).all())


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_inputs_at_the_limits_of_bfloat16(name: str) -> None:
    stored = random_blocks(name, 33, 64)
    layer = BlockLinear.from_stored(stored, None, torch.bfloat16)
    size = reference(stored).double().abs().sum(1)
    for given, allowed in ((0.0, 0.0), (1e-39, 2**-109), (-1e-33, 2**-109), (1e-30, 2**-108)):
        hidden = torch.full((1, 64), given, dtype=torch.bfloat16)
        expected = hidden.double() @ reference(stored).double().T
        assert bool(((layer(hidden).double() - expected).abs() <= 2**-8 * expected.abs() + allowed * size).all())
    for lost in (torch.inf, -torch.inf, torch.nan):
        hidden = torch.ones((2, 64), dtype=torch.bfloat16)
        hidden[0, 40] = lost
        assert not bool(layer(hidden)[0].isfinite().any())
        assert bool(layer(hidden)[1].isfinite().all())


@pytest.mark.parametrize(
    ("name", "exact_rows"),
    [("q4_1", 100), ("q4_1", 0), *((name, 100) for name in ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k"))],
)
def test_a_row_gets_the_same_bits_in_any_batch_and_with_any_number_of_threads(name: str, exact_rows: int) -> None:
    layer = BlockLinear.from_stored(random_blocks(name, 200, 1280), None, torch.bfloat16)
    layer.laid[EXACT_ROWS] = exact_rows
    hidden = torch.randn((77, 1280), generator=torch.Generator().manual_seed(1)).bfloat16()
    together = layer(hidden)
    for row in (0, 1, 4, 63, 64, 76):
        assert torch.equal(layer(hidden[row : row + 1])[0], together[row])
    for rows in (2, 3, 8, 9, 14):
        assert torch.equal(layer(hidden[:rows]), together[:rows])
    for threads in (1, 3, 5):
        out = torch.empty_like(together)
        layer._kernel(as_numpy(hidden), layer.laid, layer.added, as_numpy(out), threads)
        assert torch.equal(out, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_several_formats_are_one_if_they_fill_panels(dtype: torch.dtype) -> None:
    formats = (("q4_1", 64), ("q6_k", 32), ("q4_0", 32), ("q8_0", 33))
    stored = [random_blocks(name, outputs, 256) for name, outputs in formats]
    linears = [BlockLinear.from_stored(weight, None, dtype) for weight in stored]
    assert not BlockLinear.is_joinable(linears[::-1])
    assert BlockLinear.is_joinable(linears)
    joined = BlockLinear.join(linears, None)
    hidden = torch.randn((9, 256), generator=torch.Generator().manual_seed(1)).to(dtype)
    for layer in (joined, *linears):
        layer.limit_exact_rows(9)
    assert torch.equal(joined(hidden), torch.cat([layer(hidden) for layer in linears], dim=1))
    weight = torch.cat([reference(part) for part in stored]).double()
    expected, size = hidden.double() @ weight.T, hidden.double().abs() @ weight.abs().T
    rounding, error = (2**-8 * expected.abs(), 1e-5) if dtype == torch.bfloat16 else (0.0, 1e-6)
    assert bool(((joined(hidden).double() - expected).abs() <= rounding + error * size).all())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(llama_of_whole_blocks(), tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_k", "int8"])
def test_a_rolling_batch_generates_what_the_unpacked_model_does(plain: Path, name: str) -> None:
    options = HuggingFaceOptions(dtype="fp32", quantize=name)
    engine = Engine(load_model(AutoModelForCausalLM, str(plain), options))
    reference = load_model(AutoModelForCausalLM, str(plain), options)
    assert any(isinstance(module, BlockLinear) for module in reference.modules())
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in prompts(6)]
    engine.run()
    for prompt, answer in zip(prompts(6), answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)
    assert engine.fused["mlps"] == engine.fused["attentions"] == engine.fused["decoder_layers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "others"), [("q4_k", "q6_k"), ("q5_k", "q6_k"), ("q4_0", "q4_1"), ("q8_0", "q8_0")], ids="-".join
)
def test_a_file_of_mixed_formats_generates_what_its_unpacked_weights_do(tmp_path: Path, most: str, others: str) -> None:
    path = str(mixed_gguf(tmp_path / "model.gguf", most, others))
    unpacked, model = (load_model(AutoModelForCausalLM, path, HuggingFaceOptions(dtype="fp32")) for _ in range(2))
    assert not any(isinstance(module, BlockLinear) for module in unpacked.modules())
    details = keep_stored(model, path)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    assert {name for name in FORMATS if name in details["quantization"]} == {most, others}
    engine = Engine(model)
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in prompts(6)]
    engine.run()
    for prompt, answer in zip(prompts(6), answers, strict=True):
        assert answer.tokens == generated_like(unpacked, prompt, answer.tokens, 12)
    assert engine.fused["mlps"] == engine.fused["attentions"] == engine.fused["decoder_layers"] > 0


def test_a_file_in_q5_0_is_held_in_blocks_of_the_same_weights(tmp_path: Path) -> None:
    path = str(mixed_gguf(tmp_path / "model.gguf", "q5_0", "q8_0"))
    unpacked, model = (load_model(AutoModelForCausalLM, path, HuggingFaceOptions(dtype="fp32")) for _ in range(2))
    assert "16 q8_0" in keep_stored(model, path)["quantization"]
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    hidden = torch.eye(model.config.hidden_size)
    for name in ("q_proj", "k_proj", "o_proj"):
        layers = (getattr(each.model.layers[1].self_attn, name) for each in (model, unpacked))
        found, expected = (layer(hidden) for layer in layers)
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_decoding_in_bfloat16_is_one_call(plain: Path) -> None:
    options = HuggingFaceOptions(dtype="bf16", quantize="q4_0")
    engine = Engine(load_model(AutoModelForCausalLM, str(plain), options))
    _, answer = engine.add(prompts(1)[0], max_new_tokens=12)
    engine.run()
    assert len(answer.tokens) == 12
    assert engine.fused["models"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "wavlm"])
def test_models_that_ask_for_weights_compute_with_what_is_stored(kind: str) -> None:
    """Mamba brings activations to the type of its head's weight; WavLM's attention reads the weights of its layers."""
    torch.manual_seed(0)
    if kind == "mamba":
        model: Any = random_model(MambaConfig(vocab_size=259, hidden_size=64, num_hidden_layers=2, state_size=8))
        given = torch.tensor([[5, 70, 11, 200]])
    else:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        model, given = WavLMModel(WavLMConfig(**sizes, num_conv_pos_embedding_groups=4)).eval(), torch.randn(1, 8000)
    expected, kept = copy.deepcopy(model), {}
    quantize_to_blocks(model, "q8_0", kept)
    with torch.inference_mode():
        for name, layer in kept.items():
            expected.get_submodule(name).weight.copy_(layer.stored.numbers().weight())
        torch.testing.assert_close(model(given)[0], expected(given)[0], rtol=1e-4, atol=1e-4)
    quantised = {name.rpartition(".")[2] for name in kept}
    assert quantised >= ({"lm_head", "out_proj"} if kind == "mamba" else {"intermediate_dense"})
    assert not quantised & {"q_proj", "k_proj", "v_proj"}


@pytest.mark.slow
def test_layers_of_odd_widths_keep_their_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(97, 64)
    quantize_to_blocks(model, "q8_0")
    assert "option.quantize=q8_0: 1 linear layers keep their weights" in caplog.text
