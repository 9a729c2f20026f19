"""Small files in GGUF, written by the package gguf."""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
