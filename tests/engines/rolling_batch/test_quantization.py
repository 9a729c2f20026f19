"""Quantised weights: the rolling batch generates what the quantised model generates, and errors name the option."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rolling_batch_helpers import Engine, Received, generated, generated_like, prompts
from tiny_models import llama_of_whole_blocks, saved_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from handlers.checkpoints.blocks.int8_activations import Int8BlockLinear
from handlers.checkpoints.blocks.layers import BlockLinear, reads_codebooks
from handlers.checkpoints.blocks.packed_layers import keep_packed
from handlers.checkpoints.quantization import (
    Int8Linear,
    grouped_8_bits,
    leave_uncompiled,
    quantization_details,
    warn_once_of_casts,
)
from handlers.checkpoints.transformers_loading import load_model, quantize_blocks
from handlers.cpu_kernels.blocks.layout import EXACT_ROWS
from handlers.huggingface import model as transformers_model
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.engine_loading import load_engine
from lmi_server.contract.errors import ModelLoadError
from lmi_server.contract.generation import SamplingParameters

pytestmark = pytest.mark.slow

PROMPTS = prompts(6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(llama_of_whole_blocks(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def compressed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with packed 4-bit weights, as llm-compressor writes them."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return compress(plain, tmp_path_factory.mktemp("compressed"), "pack-quantized", weights)


def compress(plain: Path, directory: Path, form: str, weights: dict[str, Any], **more: Any) -> Path:
    """Save the model in `plain` with its linear layers quantised; `more` has the scheme of their inputs."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = AutoModelForCausalLM.from_pretrained(plain)
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        quant_method="compressed-tensors",
        ignore=["lm_head"],
        format=form,
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().unflatten(1, (-1, weights.get("group_size") or module.in_features))
            module.weight_scale.data.copy_(groups.abs().amax(-1) / (2 ** (weights["num_bits"] - 1) - 1))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    saved_model(model, directory)
    compressor.update_config(str(directory))
    return directory


def load(directory: Path, **options: Any) -> Any:
    return load_model(AutoModelForCausalLM, str(directory), HuggingFaceOptions(dtype="fp32", **options))


def test_a_rolling_batch_generates_what_the_quantised_model_does(plain: Path) -> None:
    engine, reference = Engine(load(plain, quantize="bitsandbytes8")), load(plain, quantize="bitsandbytes8")
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)
    assert engine.fused["mlps"] == engine.fused["attentions"] == 0
    assert engine.fused["norms"] == 5


def test_4_bits_of_bitsandbytes_are_blocks_that_give_its_tokens(plain: Path) -> None:
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=settings)
    engine = Engine(load(plain, quantize="bitsandbytes4"))
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)
    assert engine.fused["decoder_layers"] == (2 if reads_codebooks() else 0)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_layers_of_4_bits_have_the_weights_of_bitsandbytes(kind: str, is_nested: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    packed = Linear4bit(256, 100, bias=False, compute_dtype=torch.float32, quant_type=kind)
    weight = torch.randn((100, 256), generator=torch.Generator().manual_seed(1))
    packed.weight = Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=is_nested)
    packed.to("cpu")
    expected = dequantize_4bit(packed.weight.data, packed.weight.quant_state)
    model: Any = nn.Sequential(packed)
    model.dtype = torch.float32
    assert keep_packed(model) == reads_codebooks()  # elsewhere the layer keeps the code of its library
    for exact_rows in (256, 0):
        if reads_codebooks():
            model[0].laid[EXACT_ROWS] = exact_rows
        assert torch.equal(model[0](torch.eye(256)).T, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "strategy": "group", "group_size": 32},
        {"num_bits": 4, "strategy": "group", "group_size": 64},
        {"num_bits": 8, "strategy": "channel"},
    ],
)
def test_packed_weights_are_those_of_compressed_tensors(
    plain: Path, weights: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """In bfloat16 scales are exact in float16, so that blocks take them; with those of float32 layers are unpacked."""
    model = AutoModelForCausalLM.from_pretrained(plain).to(dtype)
    model.save_pretrained(tmp_path / "plain")
    directory = compress(tmp_path / "plain", tmp_path, "pack-quantized", {"type": "int", "symmetric": True, **weights})
    served = load_model(AutoModelForCausalLM, str(directory), HuggingFaceOptions(dtype="auto"))
    library = AutoModelForCausalLM.from_pretrained(directory)
    layer, expected = (model.model.layers[1].mlp.down_proj for model in (served, library))
    assert isinstance(layer, BlockLinear) == (dtype == torch.bfloat16)
    with torch.inference_mode():
        for model in (served, library):
            model(torch.zeros((1, 1), dtype=torch.long))  # the library unpacks weights at the first call
        rows = torch.eye(layer.in_features, dtype=dtype)
        assert torch.equal(layer(rows), expected(rows))


def test_packed_weights_give_the_tokens_of_compressed_tensors_in_fp32(plain: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain).bfloat16()
    model.save_pretrained(tmp_path / "plain")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    directory = compress(tmp_path / "plain", tmp_path, "pack-quantized", weights)
    engine = Engine(load(directory))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    assert engine.fused["attentions"] == 2
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)


def test_packed_weights_of_compressed_tensors_are_saved_as_blocks(plain: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(plain).bfloat16().save_pretrained(tmp_path / "plain")
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    directory = compress(tmp_path / "plain", tmp_path / "packed", "pack-quantized", weights)
    packed = load(directory, save_mp_checkpoint_path=str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    assert isinstance(saved.model.layers[1].mlp.down_proj, BlockLinear)
    ids = torch.tensor([[5, 70, 11, 200]])
    with torch.inference_mode():
        assert torch.equal(saved(ids).logits, packed(ids).logits)


def test_layers_of_compressed_tensors_that_blocks_do_not_hold_are_saved_unpacked(
    compressed: Path, tmp_path: Path
) -> None:
    """Their scales are float32, which are not exact in float16."""
    packed = load(compressed, save_mp_checkpoint_path=str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    for model in (packed, saved):
        assert type(model.model.layers[1].mlp.down_proj) is nn.Linear
    assert torch.equal(saved.model.layers[1].mlp.down_proj.weight, packed.model.layers[1].mlp.down_proj.weight)


def test_8_bits_of_bitsandbytes_are_blocks_in_bfloat16(plain: Path) -> None:
    options = HuggingFaceOptions(dtype="bf16", quantize="bitsandbytes8")
    layer = load_model(AutoModelForCausalLM, str(plain), options).model.layers[0].mlp.gate_proj
    library = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    own = library.model.layers[0].mlp.gate_proj.weight
    assert isinstance(layer, BlockLinear)
    found = layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).T.float()
    assert torch.allclose(found, own.data.float() * own.SCB[:, None] / 127, rtol=2**-7, atol=0), "rounded to bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bits_of_bitsandbytes_become_numbers_of_a_gpu(dtype: torch.dtype) -> None:
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    linear = nn.Linear(96, 40)
    library = Linear8bitLt(96, 40, has_fp16_weights=False)
    library.load_state_dict(linear.state_dict())
    layer = grouped_8_bits(library.to("cpu"), dtype)
    assert layer is not None
    found, stored = layer.held().plain(), library.weight
    torch.testing.assert_close(found, stored.data.float() * stored.SCB.float()[:, None] / 127)
    exact = linear.weight.detach()
    assert float((found - exact).abs().max()) < 0.01 * float(exact.abs().max())
    assert layer.bias.dtype == dtype
    assert grouped_8_bits(Linear8bitLt(40, 8, has_fp16_weights=False).to("cpu"), dtype) is None


def test_a_compressed_checkpoint_is_served(compressed: Path) -> None:
    engine, reference = Engine(load(compressed)), load(compressed)
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)


def test_bitsandbytes_says_once_that_it_casts_inputs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.autograd._functions import MatMul8bitLt  # the product of its layers on a GPU
    from bitsandbytes.nn import Linear8bitLt

    monkeypatch.setattr(logging.getLogger("bitsandbytes.autograd._functions"), "filters", [])  # of other tests
    layer = Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    hidden = torch.ones(2, 64, dtype=torch.bfloat16)
    layer(hidden)
    warn_once_of_casts()
    for _ in range(3):
        MatMul8bitLt.apply(hidden, layer.weight.data, None, None, layer.state)
    assert sum("inputs will be cast" in record.message for record in caplog.records) == 1


def test_a_checkpoint_that_rounds_activations_is_judged_by_its_error(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """W8A8: each row of the activations is rounded to 8 bits, so that logits over a KV cache are never quite equal."""
    caplog.set_level("INFO")
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    rounded = {**eight, "strategy": "token", "dynamic": True}
    directory = compress(
        plain, tmp_path / "w8a8", "int-quantized", {**eight, "strategy": "channel"}, input_activations=rounded
    )
    options = HuggingFaceOptions(dtype="fp32", kv_cache_memory_gb=0.01)
    loaded = load_engine(lambda: transformers_model.load(str(directory), options), options)
    assert "its layers round their inputs: on random tokens the logits differ by" in caplog.text
    reference, same = AutoModelForCausalLM.from_pretrained(plain), 0
    for prompt in PROMPTS:
        answer = Received()
        loaded.engine.add("a", prompt, SamplingParameters(max_new_tokens=1, ignore_eos=True), "", 3, answer.take)
        while loaded.engine.has_work:
            loaded.engine.step()
        same += answer.tokens == generated(reference, prompt, 1)
    assert same >= len(PROMPTS) - 1


@pytest.mark.parametrize(("method", "share"), [("bitsandbytes4", 0.75), ("bitsandbytes8", 0.8)])
def test_the_memory_that_is_saved_is_logged(
    plain: Path, method: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    details = quantization_details(load(plain, quantize=method))
    assert details["quantization"] == "bitsandbytes"
    assert details["weights_mib"] < share * details["unquantized_weights_mib"]
    assert f"take {details['weights_mib']} MiB; unquantised" in caplog.text
    assert quantization_details(load(plain)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_8_bit_weights_leave_activations_alone(plain: Path, dtype: torch.dtype, rows: int) -> None:
    layer = load(plain, quantize="bitsandbytes8").model.layers[0].mlp.gate_proj
    assert isinstance(layer, Int8Linear)
    weight = layer.weight.float() * layer.scales.float()[:, None]
    original = AutoModelForCausalLM.from_pretrained(plain).model.layers[0].mlp.gate_proj.weight.detach()
    assert float((weight - original).norm() / original.norm()) < 0.01
    hidden = torch.randn((1, rows, layer.in_features), generator=torch.Generator().manual_seed(1))
    hidden[0, 0, 3] = 60.0  # an outlier, which changes how bitsandbytes computes the other rows
    layer.scales = layer.scales.to(dtype)
    expected = nn.functional.linear(hidden.to(dtype).double(), (layer.weight.double() * layer.scales.double()[:, None]))
    error = float((layer(hidden.to(dtype)).double() - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_plain_checkpoint_is_not_taken_for_a_quantised_one(plain: Path, method: str) -> None:
    """The words are those of `lmi-server check`, which may not have seen the checkpoint."""
    with pytest.raises(ModelLoadError) as refused:
        load(plain, quantize=method)
    problem = HuggingFaceOptions(quantize=method).checkpoint_problem(json.loads((plain / "config.json").read_text()))
    assert problem is not None
    assert str(refused.value) == f"option.quantize={method} is not allowed; {problem[1]}"


def test_activations_of_4_bits_are_refused_before_weights_are_read(plain: Path, tmp_path: Path) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(ModelLoadError, match=r"option\.activation_dtype=int8 is not allowed; .* are not rounded"):
        load(tmp_path, quantize="bitsandbytes4", activation_dtype="int8")


def test_activations_of_8_bits_are_rounded(plain: Path) -> None:
    options = HuggingFaceOptions(dtype="bf16", quantize="bitsandbytes8", activation_dtype="int8")
    layers = load_model(AutoModelForCausalLM, str(plain), options).model.layers.modules()
    assert {type(layer) for layer in layers if hasattr(layer, "in_features")} == {Int8BlockLinear}


def test_blocks_of_a_model_in_fp16_are_refused_with_its_type(plain: Path) -> None:
    text = r"option\.quantize=q8_0 is not allowed; on a CPU .* in fp16 \(option\.dtype=fp16\); set option\.dtype=bf16"
    options = HuggingFaceOptions(dtype="fp16", quantize="q8_0")
    with pytest.raises(ModelLoadError, match=text):
        load_model(AutoModelForCausalLM, str(plain), options)
    stored = AutoModelForCausalLM.from_pretrained(plain).to(torch.float64)
    with pytest.raises(ModelLoadError, match=r"in float64 \(option\.dtype=auto\)"):
        quantize_blocks(stored, HuggingFaceOptions(quantize="q8_0"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_missing_package_is_named(plain: Path, tmp_path: Path, method: str) -> None:
    declared = {"quant_method": method, "bits": 4, "group_size": 32}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError,
        match=rf"quantised with {method} need gptqmodel.*, which is not installed; install lmi-server\[gptq\]",
    ):
        load(tmp_path, quantize=method)


@pytest.mark.parametrize(
    ("method", "declared", "layout"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq", {"is_marlin_format": True}, "marlin"),
        ("gptq", {"format": "bitblas"}, "bitblas"),
        ("awq", {"version": "GEMV"}, "gemv"),
        ("awq", {"format": "gemv_fast", "version": "gemm"}, "gemv_fast"),
        ("awq", {"version": "llm-awq"}, "llm-awq"),
    ],
)
def test_weights_that_lie_for_gpus_are_refused_on_the_cpu(
    plain: Path, tmp_path: Path, method: str, declared: dict[str, Any], layout: str
) -> None:
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32, **declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=rf"{method} weights in the layout {layout} are for GPUs; on CPUs name a"):
        load(tmp_path, quantize=method)


@pytest.mark.parametrize("bits", [1, 5, 6, 7, "4", None, [4], "4" * 10**6])
def test_gptq_in_bits_that_transformers_does_not_read_is_refused(plain: Path, tmp_path: Path, bits: Any) -> None:
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"bits is .*, and transformers reads gptq in 2, 3, 4 and 8 bits; name a"):
        load(tmp_path)


@pytest.mark.parametrize("method", [["gptq"], {"gptq": 1}, 3])
def test_a_method_that_is_no_text_is_an_error_of_the_load(plain: Path, tmp_path: Path, method: Any) -> None:
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError):
        load(tmp_path)


class FakePackedLayer(nn.Linear):
    """Unpacks its weight in each pass and compiles that when it is made, as TorchLinear of gptqmodel does."""

    def __init__(self, device: str, compiles: bool = True) -> None:
        super().__init__(4, 4, bias=False, device=device)
        self.register_buffer("scales", torch.ones(4, device=device))
        if compiles:
            self.dequantize_weight = self.compile_first

    def compile_first(self) -> torch.Tensor:
        raise AssertionError("compiles for minutes")

    def dequantize_weight(self) -> torch.Tensor:
        return self.weight * 2

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.dequantize_weight())


def test_layers_of_gptqmodel_on_the_cpu_compile_nothing() -> None:
    layers = nn.ModuleList([FakePackedLayer("cpu"), FakePackedLayer("meta"), FakePackedLayer("cpu", compiles=False)])
    assert leave_uncompiled(layers) == 1
    hidden = torch.ones(2, 4)
    assert torch.equal(layers[0](hidden), 2 * nn.functional.linear(hidden, layers[0].weight))
    assert "dequantize_weight" in vars(layers[1])  # on another device it stays


def test_a_quantised_checkpoint_is_not_quantised_otherwise(compressed: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"option\.quantize=bitsandbytes8, but the checkpoint is quantised with com"
    ):
        load(compressed, quantize="bitsandbytes8")


def test_widths_that_4_bit_layers_cannot_have_are_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"multiples of 64, and model\.layers\.0\.mlp\.down_proj takes 96; set opti"
    ):
        load(tmp_path, quantize="bitsandbytes4")
