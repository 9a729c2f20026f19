"""A file in GGUF that contradicts itself is refused by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf_helpers import SIZES, write_gguf
from transformers import AutoModelForCausalLM

from handlers.checkpoints.transformers_loading import load_config, load_model
from handlers.huggingface.options import HuggingFaceOptions
from lmi_server.contract.errors import ModelLoadError


def test_a_weight_of_another_shape_than_the_sizes_give_it_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", layers=2)  # three tokens, and embeddings of 32
    named = re.escape(f"{path}: model.embed_tokens.weight is (32, 32), but the sizes in the file make it (3, 32)")
    with pytest.raises(ModelLoadError, match=named):
        load_model(AutoModelForCausalLM, str(path), HuggingFaceOptions())


@pytest.mark.parametrize(("name", "size"), [("embedding_length", 1), ("embedding_length", 30)])
def test_sizes_that_no_model_has_are_refused(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, name, size)
    path = write_gguf(tmp_path / "model.gguf", layers=2)
    with pytest.raises(ModelLoadError, match=re.escape(f"AutoConfig cannot load {path}: ")):
        load_config(str(path), HuggingFaceOptions())


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
        ("llama", "embedding_length", 2**16),
        ("llama", "feed_forward_length", 2**31),
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
    [("qwen2moe", "attention.head_count_kv", 0), ("qwen2moe", "embedding_length", 0), ("phi3", "context_length", 64)],
)
def test_sizes_with_which_no_model_can_be_made_are_refused_for_the_file(
    architecture: str, name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A division by zero, a power of zero, and a padding token behind the three of the vocabulary."""
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
