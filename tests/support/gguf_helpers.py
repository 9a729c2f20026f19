"""Small files in GGUF, written by the package gguf."""

from __future__ import annotations

from pathlib import Path

SIZES = {"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48}


def write_gguf(path: Path, architecture: str = "llama", layers: int = 0, **strings: str) -> Path:
    """Write a header of this architecture with one tensor of 32 x 32; `strings` are further values below it.

    Of some `layers` there is a norm.
    """
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    for name, size in SIZES.items():
        writer.add_uint32(f"{architecture}.{name}", size)
    writer.add_head_count(4)
    writer.add_token_list(["a", "b", "c"])
    for name, text in strings.items():
        writer.add_string(f"{architecture}.{name.replace('__', '.')}", text)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), dtype=np.float32))
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
