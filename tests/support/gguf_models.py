"""Small models in GGUF with weights in blocks of few bits, written by the package gguf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny_models import byte_tokenizer

from handlers.checkpoints.blocks.formats import FORMATS, Q4_ZERO, StoredWeight

# Scales with which weights are about 0.1 wide.
_SIZES = {"q8_0": 1e-3, "q4_0": 0.02, "q4_1": 0.01, "q4_k": 5e-4, "q5_k": 2.5e-4, "q6_k": 1e-4}
# The sizes of a small Llama whose widths are multiples of 256, as K-quants need them.
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 256, 512, 2, 4, 2


def random_blocks(name: str, outputs: int, inputs: int, size: float = 1.0) -> StoredWeight:
    """Return a weight of random numbers, every one of which occurs; `size`: of the scales."""
    kind, chance = FORMATS.get(name, Q4_ZERO), torch.Generator().manual_seed(outputs * inputs)
    shape = outputs, inputs // kind.block_inputs
    raw = torch.randint(256, (*shape, kind.block_bytes), generator=chance, dtype=torch.uint8)
    for place in kind.scales:
        scales = torch.randn((*shape, 1), generator=chance) * size
        raw[:, :, place : place + 2] = scales.half().view(torch.uint8)
    return StoredWeight(kind, raw.flatten(1))


def mixed_gguf(path: Path, most: str, others: str) -> Path:
    """Write a small Llama: its weights in the format `most`, but values, down projections and the head in `others`.

    Files named _K_M are mixed so. The tokenizer of bytes is saved beside the file.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path.parent)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokenizer))
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))

    def add(name: str, outputs: int, inputs: int = _HIDDEN) -> None:
        is_other = any(part in name for part in ("attn_v", "ffn_down", "output.weight"))
        form = others if is_other and "attn_output" not in name else most
        if form in _SIZES:
            raw = random_blocks(form, outputs, inputs, _SIZES[form]).raw.numpy()
        else:
            weights = np.random.default_rng(outputs * inputs).standard_normal((outputs, inputs), np.float32)
            raw = quants.quantize(weights, GGMLQuantizationType[form.upper()])
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[form.upper()])

    add("token_embd.weight", len(tokenizer))
    add("output.weight", len(tokenizer))
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{norm}.weight", np.ones(_HIDDEN, np.float32))
        for name, heads in (("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS), ("output", _HEADS)):
            add(f"{block}.attn_{name}.weight", heads * _HIDDEN // _HEADS)
        add(f"{block}.ffn_gate.weight", _INNER)
        add(f"{block}.ffn_up.weight", _INNER)
        add(f"{block}.ffn_down.weight", _HIDDEN, _INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
