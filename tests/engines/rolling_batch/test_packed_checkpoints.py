"""Checkpoints in gptq and awq on the CPU: what their layers stand for, and what cannot be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_models import packed_llama
from rolling_batch_helpers import Engine, generated_like, prompts
from safetensors.torch import load_file, save_file
from tiny_models import llama_of_whole_blocks
from transformers import AutoModelForCausalLM

from handlers.checkpoints.blocks.layers import AdaptedBlockLinear, BlockLinear, StoredEmbedding
from handlers.checkpoints.blocks.packed_checkpoints import packed_to_save
from handlers.checkpoints.transformers_loading import load_model
from handlers.huggingface.options import HuggingFaceOptions
from lmi_server.contract.errors import ModelLoadError

pytestmark = pytest.mark.slow

PROMPTS = prompts(6)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"symmetric": True},
    {"group": 64, "form": "gptq_v2"},
    {"group": -1, "symmetric": True, "bits": 8},
    {"bits": 2},
    {"bits": 3},
    {"bits": 3, "symmetric": True, "group": 64, "form": "gptq_v2"},
    {"bits": 3, "act_order": True},
    {"act_order": True},
    {"method": "awq"},
)


def load(directory: Path, dtype: str = "fp32", **options: Any) -> Any:
    return load_model(AutoModelForCausalLM, str(directory), HuggingFaceOptions(dtype=dtype, **options))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_layers_have_the_weights_that_are_packed(tmp_path: Path, kind: dict[str, Any], dtype: str) -> None:
    expected, found = packed_llama(tmp_path, **kind), load(tmp_path, dtype)
    for name in ("self_attn.v_proj", "mlp.down_proj"):
        layer = found.model.layers[1].get_submodule(name)
        assert isinstance(layer, AdaptedBlockLinear if kind.get("act_order") or dtype == "fp16" else BlockLinear)
        weight = layer(torch.eye(layer.in_features, dtype=found.dtype)).T
        assert torch.equal(weight, expected.model.layers[1].get_submodule(name).weight.to(found.dtype))


@pytest.mark.parametrize("kind", [{}, {"method": "awq"}, {"act_order": True}], ids=str)
def test_a_rolling_batch_generates_what_the_unpacked_model_does(tmp_path: Path, kind: dict[str, Any]) -> None:
    reference = packed_llama(tmp_path, **kind)
    engine = Engine(load(tmp_path, quantize=kind.get("method", "gptq")))
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)
    assert engine.fused["decoder_layers"] == (0 if kind.get("act_order") else 2)


@pytest.mark.parametrize("kind", [{}, {"method": "awq"}, {"act_order": True}], ids=str)
def test_a_model_in_fp16_computes_with_its_blocks(tmp_path: Path, kind: dict[str, Any]) -> None:
    packed_llama(tmp_path, **kind)
    engine = Engine(load(tmp_path, "fp16"))
    answers = [engine.add(prompt, max_new_tokens=12)[1] for prompt in PROMPTS]
    engine.run()
    reference = load(tmp_path, "fp16")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == generated_like(reference, prompt, answer.tokens, 12)


@pytest.mark.parametrize("kind", [{"bits": 8}, {"group": 16}], ids=str)
def test_what_blocks_do_not_hold_is_unpacked(
    tmp_path: Path, kind: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected, found = packed_llama(tmp_path, **kind), load(tmp_path)
    assert torch.equal(found.model.layers[0].mlp.up_proj.weight, expected.model.layers[0].mlp.up_proj.weight)
    assert "14 of 14 packed layers are unpacked to float32" in caplog.text


def test_a_checkpoint_in_several_files_is_read(tmp_path: Path) -> None:
    expected = packed_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-{place % 2 + 1}-of-2.safetensors" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, tmp_path / file, {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    layer = load(tmp_path).model.layers[1].mlp.down_proj
    assert torch.equal(layer(torch.eye(128)).T, expected.model.layers[1].mlp.down_proj.weight)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"'\.\./model\.safetensors' is no name of a file"):
        load(tmp_path)
    for text in ("[]", "{", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ModelLoadError, match="has no weight_map of files"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", None, "no qzeros"),
        ("scales", lambda scales: scales[:, :-1].contiguous(), "their sizes do not fit"),
        ("scales", lambda scales: scales[:0], "no packed weights of 64 inputs and 128 outputs"),
        ("scales", lambda scales: scales[0, 0].clone(), "0-d tensor"),
        ("qweight", lambda words: words[:-1].contiguous(), "their sizes do not fit"),
        ("qweight", lambda words: words[: len(words) // 4].contiguous(), "1 bits"),
        ("qweight", lambda words: words.float(), "their types are"),
        ("g_idx", lambda groups: groups - 1, "g_idx names other groups"),
        ("g_idx", lambda groups: groups[1:].contiguous(), "g_idx names other groups"),
    ],
)
def test_damaged_layers_are_named(tmp_path: Path, part: str, change: Any, message: str) -> None:
    packed_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj has .*" + re.escape(message)):
        load(tmp_path)


def test_packed_tensors_of_no_linear_layer_are_named(tmp_path: Path) -> None:
    packed_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.qweight"] = tensors["model.layers.1.mlp.up_proj.qweight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"7\.mlp\.up_proj is packed, and belongs to no linear layer of Llama"):
        load(tmp_path)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k", "int8"])
def test_saved_blocks_are_those_that_were_quantised(tmp_path: Path, kind: str, is_tied: bool) -> None:
    plain = llama_of_whole_blocks()
    if is_tied:
        plain.config.tie_word_embeddings = True
        plain.tie_weights()
    plain.save_pretrained(tmp_path / "plain")
    quantised = load(tmp_path / "plain", quantize=kind, save_mp_checkpoint_path=str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    assert isinstance(saved.model.layers[0].mlp.up_proj, BlockLinear)
    assert isinstance(saved.get_input_embeddings(), StoredEmbedding) == is_tied
    ids = torch.tensor([[5, 70, 11, 200]])
    with torch.inference_mode():
        assert torch.equal(saved(ids).logits, quantised(ids).logits)
    before, after = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "saved"))
    assert after < 0.62 * before
    with pytest.raises(ModelLoadError, match=r"option\.quantize=q8_0, but the checkpoint is quantised with blocks"):
        load(tmp_path / "saved", quantize="q8_0")
    with pytest.raises(ModelLoadError, match="weights in blocks are for one process on a CPU in bf16 or fp32"):
        load(tmp_path / "saved", dtype="fp16")


@pytest.mark.parametrize("kind", [*KINDS, {"bits": 8}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_packed_checkpoints_are_saved_as_the_blocks_that_they_become(
    tmp_path: Path, kind: dict[str, Any], biased: bool
) -> None:
    packed_llama(tmp_path / "packed", biased=biased, **kind)
    packed = load(tmp_path / "packed", save_mp_checkpoint_path=str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    name = "model.layers.1.self_attn.q_proj"
    assert type(saved.get_submodule(name)) is type(packed.get_submodule(name))
    ids = torch.tensor([[5, 70, 11, 200]])
    with torch.inference_mode():
        assert torch.equal(saved(ids).logits, packed(ids).logits)
    names = {key.removeprefix(f"{name}.") for key in load_file(tmp_path / "saved" / "model.safetensors") if name in key}
    ordered = {"order"} if kind.get("act_order") else set()
    # Zeros of 8 bits that are not 128 do not fit into blocks: such layers are unpacked.
    assert names == {"weight" if kind == {"bits": 8} else "blocks"} | ordered | ({"bias"} if biased else set())


def test_packed_checkpoints_of_tied_embeddings_are_saved(tmp_path: Path) -> None:
    packed_llama(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "packed" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    packed = load(tmp_path / "packed", save_mp_checkpoint_path=str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    ids = torch.tensor([[5, 70, 11, 200]])
    with torch.inference_mode():
        assert torch.equal(saved(ids).logits, packed(ids).logits)
    assert saved.lm_head.weight is saved.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k", "int8", "bitsandbytes8", "awq"])
def test_packed_checkpoints_are_not_quantised_again(tmp_path: Path, kind: str) -> None:
    packed_llama(tmp_path / "packed")
    message = f"option.quantize={kind}, but the checkpoint is quantised with gptq already .* remove the key"
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "packed", quantize=kind, save_mp_checkpoint_path=str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_packed_layers_without_blocks_are_not_saved(tmp_path: Path) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(32, 32))
    model.dtype, model[0].qweight = torch.float32, torch.zeros(1)
    with pytest.raises(ModelLoadError, match=r"1 layers of gptq, 0 among them, are not held in blocks .* serve the"):
        packed_to_save(model, "gptq")


@pytest.mark.parametrize(
    ("files", "part", "change", "message"),
    [  # the order of packed files follows from g_idx
        ("saved", "order", lambda order: order[1:].contiguous(), "its order is none of 64 inputs"),
        ("saved", "order", lambda order: order.clamp(max=62), "its order is none of 64 inputs"),
        ("saved", "order", lambda order: order.float(), "its order is none of 64 inputs"),
        *(
            (files, "bias", change, f"a bias {found} is none of 128 outputs")
            for files in ("packed", "saved")
            for change, found in (
                (lambda bias: bias[1:].contiguous(), r"\(127,\) of torch.float32"),
                (lambda bias: bias.int(), r"\(128,\) of torch.int32"),
            )
        ),
    ],
)
def test_other_damaged_parts_of_layers_are_named(
    tmp_path: Path, files: str, part: str, change: Any, message: str
) -> None:
    packed_llama(tmp_path / "packed", act_order=True, biased=True)
    load(tmp_path / "packed", save_mp_checkpoint_path=str(tmp_path / "saved"))
    directory = tmp_path / files
    tensors, name = load_file(directory / "model.safetensors"), f"model.layers.1.mlp.up_proj.{part}"
    save_file(tensors | {name: change(tensors[name])}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj: " + message):
        load(directory)


@pytest.mark.parametrize(
    ("form", "columns", "message"),
    [("q4_0", None, "blocks of q4_0 .* are no weights"), ("q9", None, "no format"), ("q8_0", 33, "are no weights")],
)
def test_damaged_blocks_are_named(tmp_path: Path, form: str, columns: int | None, message: str) -> None:
    llama_of_whole_blocks().save_pretrained(tmp_path / "plain")
    load(tmp_path / "plain", quantize="q8_0", save_mp_checkpoint_path=str(tmp_path))
    name = "model.layers.1.mlp.up_proj"
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["formats"][name] = form
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{name}.blocks"] = tensors[f"{name}.blocks"][:, :columns].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj: .*" + message):
        load(tmp_path)
