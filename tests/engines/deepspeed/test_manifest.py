"""option.checkpoint in DeepSpeed's own form: a list of files with a whole model is loaded, anything else refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from handlers.deepspeed.manifest import MANIFEST_TYPE, WholeModel, manifest_problem, read_manifest
from handlers.deepspeed.options import DeepSpeedOptions
from handlers.deepspeed.whole_model import _tensors, load_whole_model
from lmi_server.configuration.resolve import inspect_model
from lmi_server.contract.errors import ModelLoadError

LISTED = {"type": "BLOOM", "checkpoints": ["a.bin", "b.safetensors"], "version": 1.0}
RANKS = {"type": MANIFEST_TYPE, "tp_size": 1, "dtype": "float32", "quantization": None}
NAME = "ds_inference_checkpoint.json"


def written(directory: Path, **content: Any) -> Path:
    path = directory / NAME
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, None),
        ({"type": "ds_model", "parallelization": "pp", "mp_size": 0, "tp_size": 1}, None),
        ({"dtype": "half"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_a_list_of_files_is_a_whole_model(tmp_path: Path, changes: dict[str, Any], dtype: str | None) -> None:
    found = read_manifest(written(tmp_path, **{**LISTED, **changes}))
    assert isinstance(found, WholeModel)
    assert (found.files, found.dtype) == (("a.bin", "b.safetensors"), dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"type": "Megatron"}, "has weights under Megatron's names; convert them to a Hugging Face checkpoint"),
        ({"type": "GLM"}, "type='GLM' is not known; allowed: BLOOM and ds_model with a list of files"),
        ({"type": ["x"]}, "is not known"),
        ({"parallelization": "tp"}, "is for DeepSpeed's kernels, which have a weight layout of their own"),
        ({"checkpoints": {"tp": ["a"], "non_tp": ["b"]}}, "is for DeepSpeed's kernels"),
        ({"mp_size": 2}, "mp_size=2 says that the files are parts of ranks; remove the key to load the model's"),
        ({"dtype": "int8"}, "dtype='int8' is not allowed; allowed: float, "),
        ({"checkpoints": []}, "is damaged: checkpoints: "),
        ({"checkpoints": ["../a.bin"]}, "is damaged: checkpoints.0: "),
        ({"checkpoints": [".."]}, "is damaged: checkpoints.0: "),
        ({"checkpoints": ["/etc/passwd"]}, "is damaged: checkpoints.0: "),
        ({"checkpoints": None}, "is damaged: checkpoints: "),
        ({"checkpoints": ["a.bin"] * 1000}, "a file is named twice, and would be loaded twice"),
        ({"checkpoints": ["\u00e9" * 255]}, "lacks \u00e9"),  # more bytes than a name may have
        ({"mp_size": "\n2026 ERROR \x1b[2J"}, r"mp_size=\n2026 ERROR \x1b[2J says"),
    ],
)
def test_other_forms_are_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    problem = manifest_problem(written(tmp_path, **{**LISTED, **changes}), 1)
    assert problem is not None
    assert text in problem


@pytest.mark.parametrize("content", ["", "[1]", "{", "null", '{"type": 1}', '{"type": "ds_model"}'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    assert manifest_problem(tmp_path / NAME, 1) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoints": [0] * 1000},
        {**RANKS, "checkpoints": {"tp": [0] * 1000}},
        {**RANKS, "checkpoints": {"tp": [[0] * 1000]}},
    ],
)
def test_only_the_first_of_many_wrong_names_is_kept(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is damaged: checkpoints") as raised:
        read_manifest(written(tmp_path, **{**LISTED, **changes}))
    cause = raised.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


def test_a_pipe_or_a_device_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")  # its size is 0
    for name in ("pipe", "device"):
        assert "it is no file" in (manifest_problem(tmp_path / name, 1) or "")


def test_check_looks_at_the_manifest_and_its_files(tmp_path: Path) -> None:
    written(tmp_path, **LISTED)
    (tmp_path / "a.bin").touch()
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    keys = ("engine=DeepSpeed", "option.rolling_batch=deepspeed", f"option.checkpoint={NAME}")
    (tmp_path / "serving.properties").write_text("\n".join(keys))
    (problem,) = inspect_model(tmp_path, {}).problems
    assert "lacks b.safetensors, which ds_inference_checkpoint.json names; fetch it" in problem


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_the_files_give_the_answers_of_the_model(family: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from tiny_models import byte_tokenizer, random_model, tiny_model
    from transformers import BloomConfig

    from handlers.deepspeed.model import load

    bloom = BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4)
    model = random_model(bloom) if family == "bloom" else tiny_model(family)
    model.config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    # The files of BLOOM that DeepSpeed's examples list have no prefix of the causal model.
    prefix = "transformer." if family == "bloom" else ""
    tensors = {name.removeprefix(prefix): tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(tensors)
    torch.save({name: tensors[name] for name in names[::2]}, tmp_path / "a.bin")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    written(tmp_path, **LISTED)
    options = DeepSpeedOptions(checkpoint=NAME, rolling_batch="deepspeed", dtype="fp32")
    loaded = load(str(tmp_path), options).model
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)
    (tmp_path / "a.bin").write_bytes(b"not a file of torch")
    with pytest.raises(ModelLoadError, match=r"a\.bin is damaged, or holds more than tensors"):
        load(str(tmp_path), options)
    torch.save({names[0]: tensors[names[0]]}, tmp_path / "a.bin")
    with pytest.raises(ModelLoadError, match=r"lack .*; name all files of the model"):
        load(str(tmp_path), options)


def test_a_model_of_its_own_code_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PretrainedConfig

    written(tmp_path, **{**LISTED, "checkpoints": ["a.bin"]})
    torch.save({}, tmp_path / "a.bin")
    config = type("OwnConfig", (PretrainedConfig,), {"model_type": "own"})()
    options = DeepSpeedOptions(checkpoint=NAME, rolling_batch="deepspeed")
    with pytest.raises(ModelLoadError, match=r"^option\.checkpoint: .*model_type='own'; remove the key"):
        load_whole_model(AutoModelForCausalLM, str(tmp_path), config, options)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of odd bytes before it refuses them
@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_file_is_named(tmp_path: Path, zipped: bool) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "whole.bin", _use_new_zipfile_serialization=zipped)
    whole, damaged = (tmp_path / "whole.bin").read_bytes(), tmp_path / "damaged.bin"
    refused = []
    for position in range(0, len(whole), 2):
        damaged.write_bytes(whole[:position] + bytes([whole[position] ^ 0x85]) + whole[position + 1 :])
        try:
            _tensors(damaged)
        except ModelLoadError as error:
            refused.append(error.message)
    assert len(refused) > len(whole) // 20
    assert all(str(damaged) in message for message in refused)
