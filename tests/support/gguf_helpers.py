"""Small files in GGUF, written by the package gguf."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SIZES = {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48}
_TENSORS = {"token_embd.weight": (3, 32), "output_norm.weight": (32,)}
_OF_LAYERS = {
    "attn_norm": (32,),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32)),
    "ffn_norm": (32,),
    "ffn_gate": (48, 32),
    "ffn_up": (48, 32),
    "ffn_down": (32, 48),
}
_MORE = {
    "gemma2": {"post_attention_norm": (32,), "post_ffw_norm": (32,)},
    "qwen2moe": {"ffn_gate_inp": (4, 32)},
    "qwen3": {"attn_q_norm": (8,), "attn_k_norm": (8,)},
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    layers: int = 2,
    without: Collection[str] = (),
    shapes: Mapping[str, Sequence[int]] = {},
    tokenizer: str = "llama",
    scores: int = 3,
    merges: bool = False,
    **strings: str,
) -> Path:
    """Write a model of this architecture with three tokens, whose weights are zeros.

    It lacks the keys and tensors `without`. Tensors have other `shapes` (outputs first), by name, or by the name in
    each layer. `scores`: how many tokens have one. `strings` are further values.
    """
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    for name, size in {**SIZES, "attention.head_count": 4}.items():
        if name not in without:
            writer.add_uint32(f"{architecture}.{name}", size)
    writer.add_tokenizer_model(tokenizer)
    if "tokens" not in without:
        writer.add_token_list(["a", "b", "ab"])
    if scores:
        writer.add_token_scores([-float(number) for number in range(scores)])
    if merges:
        writer.add_token_merges(["a b"])
    for name, text in strings.items():
        writer.add_string(f"{architecture}.{name.replace('__', '.')}", text)
    for name, shape in _TENSORS.items():
        if name not in without:
            writer.add_tensor(name, np.zeros(shapes.get(name, shape), dtype=np.float32))
    experts = (4,) if architecture.endswith("moe") else ()
    for layer in range(layers):
        for inner, shape in {**_OF_LAYERS, **_MORE.get(architecture, {})}.items():
            usual = (*experts, *shape) if inner in ("ffn_gate", "ffn_up", "ffn_down") else shape
            stored = f"{inner}_exps" if usual != shape else inner
            name = f"blk.{layer}.{stored}.weight"
            if name not in without:
                writer.add_tensor(name, np.zeros(shapes.get(name, shapes.get(inner, usual)), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def key_of(name: str, kind: int, value: bytes) -> bytes:
    """Return a key of a header, whose type is the number `kind` of ggml."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def tensor_of(name: str, offset: int, shape: Sequence[int] = (8,), kind: int = 0) -> bytes:
    """Return what a header says of a tensor, of float32 by itself."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name.encode() + sizes + struct.pack("<IQ", kind, offset)


def hostile_gguf(
    path: Path, keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), counts: tuple[int, int] | None = None
) -> Path:
    """Write a file with a header that no writer makes, and 128 bytes behind it; `counts` are of tensors and keys."""
    of_tensors, of_keys = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", 3, of_tensors, of_keys) + b"".join([*keys, *tensors])
    path.write_bytes(header + bytes(-len(header) % 32 + 128))
    return path
