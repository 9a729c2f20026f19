"""Packed checkpoints as a GPU holds them: what their layers stand for, and models of such, computed on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from fake_cuda import GIB, FakeCuda
from packed_models import float_llama, packed_llama
from rolling_batch_helpers import Engine, generated_like, prompts
from safetensors.torch import load_file, save_file
from tiny_models import llama_of_whole_blocks
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from handlers.checkpoints.blocks.packed_checkpoints import as_packed_layers
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
from handlers.checkpoints.blocks.stored_numbers import read_numbers
from handlers.checkpoints.grouped.layers import GroupedLinear, GroupedWeight
from handlers.checkpoints.options import QUANTIZATION_PACKAGES
from handlers.checkpoints.transformers_loading import load_model, model_arguments, quantize_blocks
from handlers.huggingface.options import HuggingFaceOptions
from handlers.rolling_batch.lora.targets import lora_targets
from lmi_server.contract.errors import ModelLoadError

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"symmetric": True},
    {"group": -1, "symmetric": True, "bits": 8},
    {"bits": 8},
    {"bits": 3, "group": 64},
    {"act_order": True},
    {"method": "awq"},
)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a checkpoint as on a GPU, but on the CPU."""
    config = as_packed_layers(AutoConfig.from_pretrained(directory), str(directory), on_gpu=True)
    assert config is not None
    return AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype)


def weight_of(layer: nn.Module, inputs: int) -> torch.Tensor:
    return layer(torch.eye(inputs)).T


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_have_the_weights_that_are_packed(tmp_path: Path, kind: dict[str, Any]) -> None:
    expected, found = packed_llama(tmp_path, **kind), load(tmp_path)
    for name in ("self_attn.v_proj", "mlp.down_proj"):
        layer = found.model.layers[1].get_submodule(name)
        assert isinstance(layer, GroupedLinear)
        exact = expected.model.layers[1].get_submodule(name).weight
        torch.testing.assert_close(weight_of(layer, layer.in_features), exact)


@pytest.mark.parametrize("kind", [{}, {"method": "awq"}, {"act_order": True}, {"biased": True}], ids=str)
def test_a_rolling_batch_generates_what_the_unpacked_model_does(tmp_path: Path, kind: dict[str, Any]) -> None:
    reference = packed_llama(tmp_path, **kind)
    engine = Engine(load(tmp_path), reference=reference)
    layers = reference.config.num_hidden_layers
    joined = 0 if kind.get("act_order") else layers  # here each layer has an order of its own
    assert engine.runner.fused["mlps"] == engine.runner.fused["attentions"] == joined
    assert set(lora_targets(reference)) <= set(lora_targets(engine.model))
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in prompts(6)]
    engine.run()
    for prompt, answer in zip(prompts(6), answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)


@pytest.mark.slow
@pytest.mark.parametrize("act_order", [False, True])
def test_an_adapter_changes_a_packed_model_as_it_changes_the_unpacked_one(tmp_path: Path, act_order: bool) -> None:
    reference = packed_llama(tmp_path / "packed", act_order=act_order)
    saved = save_adapter(reference, tmp_path / "adapter")
    adapted = with_adapter(reference, saved)
    engine = Engine(load(tmp_path / "packed"), reference=reference)
    weights = engine.engine.load_adapter(read_adapter(str(saved)))
    models = [(weights, adapted), (None, reference)]
    asked = [
        (prompt, model, engine.add(prompt, adapter, max_new_tokens=8)[1])
        for prompt in prompts(3)
        for adapter, model in models
    ]
    engine.run()
    for prompt, model, answer in asked:
        assert answer.tokens == generated_like(model, prompt, answer.tokens, 8)


def test_layers_of_one_order_are_joined() -> None:
    order = torch.randperm(64)
    one, other = (
        GroupedLinear(
            GroupedWeight(4, torch.randint(16, (outputs, 64), dtype=torch.uint8), torch.rand(outputs, 2),
                          torch.full((outputs, 2), zero, dtype=torch.uint8), order), None, torch.float32)
        for outputs, zero in ((16, 8), (24, 3))
    )  # fmt: skip
    assert GroupedLinear.is_joinable([one, other])
    rows = torch.randn(3, 64)
    joined = GroupedLinear.join([one, other], None)
    torch.testing.assert_close(joined(rows), torch.cat([one(rows), other(rows)], 1))
    other.order = None
    assert not GroupedLinear.is_joinable([one, other])


@pytest.mark.parametrize("form", ["blocks", "outputs", "layer"])
def test_a_checkpoint_in_8_bit_floats_generates_what_its_weights_say(tmp_path: Path, form: str) -> None:
    reference = float_llama(tmp_path, form)
    engine = Engine(load(tmp_path), reference=reference)
    assert isinstance(engine.model.model.layers[0].mlp.down_proj, GroupedLinear)
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in prompts(4)]
    engine.run()
    for prompt, answer in zip(prompts(4), answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)


@pytest.mark.parametrize("form", ["blocks", "outputs"])
def test_8_bit_floats_are_unpacked_on_the_cpu(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    reference = float_llama(tmp_path, form)
    found = load_model(AutoModelForCausalLM, str(tmp_path), HuggingFaceOptions(dtype="fp32"))
    layer = found.model.layers[1].mlp.up_proj
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, reference.model.layers[1].mlp.up_proj.weight)
    assert "14 of 14 packed layers are unpacked to float32, which takes more memory" in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_scale_inv", lambda scales: scales[:, :1].repeat(1, 5), "their sizes do not fit"),
        ("weight_scale_inv", lambda scales: scales.int(), "the scales are of torch.int32"),
        ("weight", lambda numbers: numbers[1:].contiguous(), "the weight is"),
        ("weight", lambda numbers: numbers.float(), "of torch.float32"),
    ],
)
def test_other_tensors_than_a_layer_has_are_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    float_llama(tmp_path, "blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    key = f"model.layers.0.mlp.up_proj.{name}"
    tensors[key] = change(tensors[key])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=rf"model\.layers\.0\.mlp\.up_proj has .*{message}"):
        load(tmp_path)


def int8_parts(**changed: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer of compressed-tensors in 8 bits: 64 outputs, 128 inputs in 4 groups."""
    parts = {
        "weight": torch.ones((64, 128), dtype=torch.int8),
        "weight_scale": torch.ones((64, 4)),
        "weight_zero_point": torch.full((64, 4), 3, dtype=torch.int8),
    }
    return parts | changed


def words_parts(**changed: Any) -> dict[str, torch.Tensor]:
    """Return the same with words of numbers of 4 bits."""
    parts = {
        "weight_packed": torch.zeros((64, 16), dtype=torch.int32),
        "weight_shape": torch.tensor([64, 128]),
        "weight_scale": torch.ones((64, 4)),
        "weight_zero_point": torch.zeros((8, 4), dtype=torch.int32),
    }
    return parts | changed


def spoiled(value: float) -> torch.Tensor:
    scales = torch.ones((64, 4))
    scales[5, 1] = value
    return scales


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (int8_parts(weight_zero_point=torch.ones((64, 2), dtype=torch.int8)), "the zeros (64, 2)"),
        (int8_parts(weight_scale=torch.ones((64, 1))), "the zeros (64, 4)"),
        (int8_parts(weight_zero_point=torch.full((64, 4), 300.0)), "the zeros (64, 4) of torch.float32"),
        (int8_parts(weight_scale=torch.ones((64, 4, 2))), "their sizes do not fit"),
        (int8_parts(weight_scale=torch.ones((64, 4, 0))), "their sizes do not fit"),
        (int8_parts(weight_scale=spoiled(torch.nan)), "some scales are infinite or NaN"),
        (int8_parts(weight_scale=spoiled(-torch.inf)), "some scales are infinite or NaN"),
        (words_parts(weight_scale=spoiled(torch.inf)), "some scales are infinite or NaN"),
        (words_parts(weight_zero_point=torch.zeros((64, 4), dtype=torch.int8)), "the zeros (64, 4) of torch.int8"),
        (words_parts(weight_zero_point=torch.zeros((64, 4), dtype=torch.int32)), "the zeros (64, 4) of torch.int32"),
    ],
)
def test_scales_and_zeros_that_are_none_of_the_weight_are_refused(parts: dict[str, torch.Tensor], message: str) -> None:
    """A kernel would read beside them, or compute without a word what the weights are not."""
    assert read_numbers(int8_parts(), (64, 128), {}).grouped() is not None
    assert read_numbers(words_parts(), (64, 128), {}).grouped() is not None
    with pytest.raises(ValueError, match=re.escape(message)):
        read_numbers(parts, (64, 128), {})


@pytest.mark.parametrize("size", [[10**15, 10**15], [10**30, 128], [128, 10**30]], ids=str)
def test_a_block_that_is_larger_than_the_layer_takes_no_more_memory(size: list[int]) -> None:
    parts = {"weight": torch.ones((64, 128)).to(torch.float8_e4m3fn), "weight_scale_inv": torch.full((1, 1), 2.0)}
    wide = parts | {"weight": torch.ones((64, 256)).to(torch.float8_e4m3fn)}
    wide["weight_scale_inv"] = torch.full((1, 2), 2.0)
    declared = {"weight_block_size": size}
    assert read_numbers(parts, (64, 128), declared).scales.shape == (64, 1)
    if size[1] == 128:
        assert read_numbers(wide, (64, 256), declared).scales.shape == (64, 2)
    else:
        with pytest.raises(ValueError, match="their sizes do not fit"):
            read_numbers(wide, (64, 256), declared)


@pytest.mark.parametrize("declared", [[0, 0], "128", [-1, 2], {}, [32], [32.0, 32]], ids=str)
def test_what_is_no_size_of_blocks_is_named(declared: Any) -> None:
    scales = torch.ones((2, 2))
    parts = {"weight": torch.ones((64, 64)).to(torch.float8_e4m3fn), "weight_scale_inv": scales}
    assert read_numbers(parts, (64, 64), {"weight_block_size": [32, 32]}).scales.shape == (64, 2)
    groups = {"group_0": {"weights": {"block_structure": "32x32"}}}
    assert read_numbers(parts, (64, 64), {"config_groups": groups}).scales.shape == (64, 2)
    with pytest.raises(ValueError, match=r"config\.json declares blocks of .*, which are not two sizes above 0"):
        read_numbers(parts, (64, 64), {"weight_block_size": declared})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("gptq", 'quantization_config is "gptq", and no object'),
        ([1], r"quantization_config is \[1\], and no object"),
        ({"quant_method": ["gptq"]}, "and no object whose quant_method is a text; fetch"),
        ({"quant_method": 5}, "and no object whose quant_method is a text; fetch"),
        ({"quant_method": "a new one"}, "quant_method is a new one, which the installed transformers does not read"),
        ({"quant_method": "packed_layers", "declared": {"quant_method": "gptq", "bits": 4}, "directory": "/",
          "saves": False, "on_gpu": False}, "quant_method is packed_layers, which the installed"),
    ],
    ids=str,
)  # fmt: skip
def test_a_declaration_that_is_none_is_named(tmp_path: Path, declared: Any, message: str) -> None:
    """transformers would give the layers of a method that it does not know random weights."""
    packed_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load_model(AutoModelForCausalLM, str(tmp_path), HuggingFaceOptions(dtype="fp32"))


@pytest.mark.parametrize("kept", [False, True])
def test_a_layer_without_tensors_is_named(tmp_path: Path, kept: bool) -> None:
    """It may have a weight that is not packed."""
    reference = packed_llama(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}
    if kept:
        tensors[f"{name}.weight"] = reference.get_submodule(name).weight.data
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if kept:
        assert type(load(tmp_path).get_submodule(name)) is nn.Linear
        return
    with pytest.raises(ModelLoadError, match=rf"{name} has no tensors, and layers like it are packed; fetch"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e8m0fnu])
def test_scales_of_types_that_no_kernel_reads_become_float32(dtype: torch.dtype) -> None:
    found = read_numbers(int8_parts(weight_scale=torch.full((64, 4), 0.5).to(dtype)), (64, 128), {})
    assert found.scales.dtype == torch.float32
    assert bool((found.scales == 0.5).all())


@pytest.mark.parametrize("content", [b"no header", None], ids=["damaged", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    """Also where its names are read before transformers reads it."""
    float_llama(tmp_path, "outputs")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    if content is not None:
        (tmp_path / "part.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"part\.safetensors cannot be read .* fetch it again"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "int8"])
def test_a_model_is_quantised_as_a_gpu_holds_it(name: str) -> None:
    of_cpu, model = (llama_of_whole_blocks() for _ in range(2))
    quantize_to_blocks(of_cpu, name)
    details = quantize_to_blocks(model, name, on_gpu=True)
    assert details["weights_mib"] < details["unquantized_weights_mib"]
    layer, same = (one.model.layers[0].mlp.down_proj for one in (model, of_cpu))
    assert isinstance(layer, GroupedLinear)
    assert layer.scales.shape[1] == (1 if name == "int8" else layer.in_features // 32)
    torch.testing.assert_close(weight_of(layer, layer.in_features), weight_of(same, layer.in_features))
    assert isinstance(model.get_input_embeddings(), nn.Embedding)


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, True),
        ({"device_map": "cuda:0"}, True),
        ({"device_map": '{"model": 0, "lm_head": "cpu"}'}, False),
        ({"save_mp_checkpoint_path": "saved"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_one_gpu_reads_packed_layers_without_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], packed: bool, gpus: int
) -> None:
    pytest.importorskip("triton")
    packed_llama(tmp_path)
    FakeCuda(memory=[(14 * GIB, 16 * GIB)] * gpus).install(monkeypatch)
    monkeypatch.setitem(QUANTIZATION_PACKAGES, "gptq", ("gptq", ("a_package_of_gptq",)))
    given = HuggingFaceOptions(dtype="bf16", **options)
    if packed and gpus == 1:
        found = model_arguments(str(tmp_path), given)
        assert found["config"].quantization_config["on_gpu"] is True
        assert found["device_map"] == options.get("device_map", "cuda")
        return
    with pytest.raises(ModelLoadError, match="need a-package-of-gptq, which is not installed"):
        model_arguments(str(tmp_path), given)


def test_what_a_gpu_does_not_hold_is_refused_with_what_to_set() -> None:
    model = llama_of_whole_blocks().to("meta")  # stands for a GPU
    with pytest.raises(
        ModelLoadError, match=r"option\.quantize=q4_k is not .*q8_0, q4_0, int8, and are not saved; set one"
    ):
        quantize_blocks(model, HuggingFaceOptions(quantize="q4_k"))
    saving = HuggingFaceOptions(quantize="q8_0", save_mp_checkpoint_path="saved")
    with pytest.raises(
        ModelLoadError, match=r"option\.quantize=q8_0 is not .* without option\.save_mp_checkpoint_path"
    ):
        quantize_blocks(model, saving)
