"""A file in GGUF that contradicts itself is refused by its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf_helpers import SIZES, write_gguf
from transformers import AutoModelForCausalLM

from handlers.checkpoints.gguf import _SPLITS
from handlers.checkpoints.transformers_loading import load_config, load_model
from handlers.huggingface.options import HuggingFaceOptions
from lmi_server.configuration.model_directory.gguf_faults import SPLITS
from lmi_server.contract.errors import ModelLoadError
from lmi_server.processes import load_progress


def test_a_weight_of_another_shape_than_the_sizes_give_it_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", shapes={"attn_k": (16, 32)})
    weight = "model.layers.0.self_attn.k_proj.weight"
    named = re.escape(f"{path}: {weight} is (16, 32), but the sizes in the file make it (32, 32)")
    with pytest.raises(ModelLoadError, match=named):
        load_model(AutoModelForCausalLM, str(path), HuggingFaceOptions())


@pytest.mark.parametrize("size", [1, 30, 2**16])
def test_sizes_that_the_tensors_have_not_are_refused_before_anything_is_allocated(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "embedding_length", size)
    path = write_gguf(tmp_path / "model.gguf")
    named = f"{path}: tensor token_embd.weight is 32 x 3, and llama.embedding_length = {size} is not its first size"
    with pytest.raises(ModelLoadError, match=re.escape(named)):
        load_config(str(path), HuggingFaceOptions())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"without": ["blk.1.attn_v.weight"]}, "has no tensor blk.1.attn_v.weight; the file is damaged"),
        ({"without": ["context_length"]}, "has no key llama.context_length, without which"),
        ({"tokenizer": "bert"}, "tokenizer.ggml.model = bert is not read from GGUF"),
        ({"scores": 0}, "has no tokenizer.ggml.merges and no tokenizer.ggml.scores"),
    ],
)
def test_faults_of_the_header_are_refused_before_the_weights_are_read(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelLoadError, match=re.escape(f"{path}: {fault}")):
        load_config(str(path), HuggingFaceOptions())


def test_a_load_counts_its_tensors_and_draws_no_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a worker writes to its standard error becomes lines of the server's log."""
    path = write_gguf(tmp_path / "model.gguf")
    load_model(AutoModelForCausalLM, str(path), HuggingFaceOptions())
    written = capfd.readouterr().err
    assert "Converting" not in written
    assert "it/s" not in written
    last = load_progress.last()
    assert last is not None
    assert (last.what, last.done, last.total) == ("loading weights", 20, 20)


def test_the_ways_to_split_a_text_are_those_that_the_header_may_name() -> None:
    assert set(_SPLITS) == set(SPLITS)


@pytest.mark.parametrize("count", [0, 1, 3, 2**31])
def test_layers_that_the_file_lacks_are_not_drawn_at_random(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "block_count", count)
    path = write_gguf(tmp_path / "model.gguf", layers=2)
    named = re.escape(f"{path}: block_count = {count}, but the file has tensors of 2 layers")
    with pytest.raises(ModelLoadError, match=named):
        load_config(str(path), HuggingFaceOptions())


@pytest.mark.parametrize(
    ("architecture", "name", "size"),
    [
        ("gemma2", "attention.key_length", 2**24),
        ("qwen2moe", "expert_count", 2**31),
    ],
)
def test_sizes_of_a_far_larger_model_are_refused_before_anything_is_allocated(
    architecture: str, name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, name, size)
    path = write_gguf(tmp_path / "model.gguf", architecture, layers=2)
    with pytest.raises(
        ModelLoadError, match=rf"{re.escape(str(path))}: the sizes in the file are those of a model with"
    ):
        load_model(AutoModelForCausalLM, str(path), HuggingFaceOptions())


@pytest.mark.parametrize(
    ("architecture", "name", "size"),
    [("qwen2moe", "attention.head_count_kv", 0), ("phi3", "context_length", 64)],
)
def test_sizes_with_which_no_model_can_be_made_are_refused_for_the_file(
    architecture: str, name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, name, size)
    path = write_gguf(tmp_path / "model.gguf", architecture, layers=2)
    with pytest.raises(ModelLoadError, match=re.escape(f"cannot load {path}: ")):
        load_model(AutoModelForCausalLM, str(path), HuggingFaceOptions())


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", layers=2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    text = f"{path}: has {len(whole) - 64} bytes, and by its header it should have {len(whole)}; copy it again"
    with pytest.raises(ModelLoadError, match=re.escape(text)):
        load_model(AutoModelForCausalLM, str(path), HuggingFaceOptions())
