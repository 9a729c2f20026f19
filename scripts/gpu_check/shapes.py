"""The models that are measured: random weights in the shapes of real models, made on the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

DEMO = Path("models/smollm2-135m-instruct")
CONTEXT = 8192
"""Tokens of prompt and output that each model may have."""

_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # SmolLM2-135M
        "demo": {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        },
        # Llama 3.1 8B
        "8b": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256,
        },
        # For dry runs.
        "tiny": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 49152,
        },
    }
)  # fmt: skip
"""What LlamaConfig is told of each shape."""


def random_model(shape: str, device: str) -> Any:
    """Return a Llama of the shape in bf16 on `device`, with random weights."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=CONTEXT, **_ENDS)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def tokenizer() -> Any:
    """Return the tokenizer of the demo model. Its texts mean nothing to a random model, but cost what they cost."""
    return AutoTokenizer.from_pretrained(DEMO)


def write_checkpoint(shape: str, directory: Path, device: str) -> None:
    """Write a model directory of the shape."""
    random_model(shape, device).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    (directory / "serving.properties").write_text("engine=Python\noption.dtype=bf16\n")


def bytes_per_step(model: Any) -> int:
    """Return the bytes of weights that a decode step reads: all but the input embeddings, which are looked up."""
    skipped = None if model.config.tie_word_embeddings else model.get_input_embeddings().weight
    return sum(weight.nbytes for weight in model.parameters() if weight is not skipped)
