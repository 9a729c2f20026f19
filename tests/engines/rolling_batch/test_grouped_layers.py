"""Packed checkpoints as a GPU holds them: what their layers stand for, and models of such, computed on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_helpers import read_adapter, save_adapter, with_adapter
from fake_cuda import GIB, FakeCuda
from packed_models import float_llama, packed_llama
from rolling_batch_helpers import Engine, generated, prompts
from safetensors.torch import load_file, save_file
from tiny_models import llama_of_whole_blocks
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from handlers.checkpoints.blocks.packed_checkpoints import as_packed_layers
from handlers.checkpoints.blocks.quantizing import quantize_to_blocks
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
    assert [answer.tokens for answer in answers] == [generated(reference, prompt, 12) for prompt in prompts(6)]


@pytest.mark.parametrize("act_order", [False, True])
def test_an_adapter_changes_a_packed_model_as_it_changes_the_unpacked_one(tmp_path: Path, act_order: bool) -> None:
    reference = packed_llama(tmp_path / "packed", act_order=act_order)
    saved = save_adapter(reference, tmp_path / "adapter")
    adapted = with_adapter(reference, saved)
    engine = Engine(load(tmp_path / "packed"), reference=reference)
    weights = engine.engine.load_adapter(read_adapter(str(saved)))
    answers = [engine.add(prompt, adapter, max_new_tokens=8)[1] for prompt in prompts(3) for adapter in (weights, None)]
    engine.run()
    expected = [generated(model, prompt, 8) for prompt in prompts(3) for model in (adapted, reference)]
    assert [answer.tokens for answer in answers] == expected


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
    assert [answer.tokens for answer in answers] == [generated(reference, prompt, 12) for prompt in prompts(4)]


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
    with pytest.raises(ModelLoadError, match=r"option\.quantize=q4_k: .*q8_0, q4_0, int8, and are not saved; set one"):
        quantize_blocks(model, HuggingFaceOptions(quantize="q4_k"))
    saving = HuggingFaceOptions(quantize="q8_0", save_mp_checkpoint_path="saved")
    with pytest.raises(ModelLoadError, match=r"option\.quantize=q8_0: .* without option\.save_mp_checkpoint_path"):
        quantize_blocks(model, saving)
