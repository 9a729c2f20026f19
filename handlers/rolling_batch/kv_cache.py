"""The KV cache: slots, contiguous per head. What they hold, and how much, is decided in `slots.py`.

A slot is addressed as if it held `max_len` tokens, so that attention reads one contiguous stretch per head and needs no
block table. On the CPU the slots are only reserved address space: a page becomes memory when it is first written, and
goes back when the slot is trimmed. The operating system's page table is the block table, as in vAttention (Prabhu et
al., ASPLOS 2025). On other devices the slots are plain tensors, so that `max_len` is chosen there such that all of them
fit.

A shared prefix is copied: 1,024 tokens of 23 KB each take 2 ms to memory that is there and 8 ms to new pages, where
computing them takes a second. The step that comes to know of it reads the prefix where it is, and the copy follows the
first token. Mapping the same pages twice takes 2 ms, and a mapping of its own per layer, head and slot, of which Linux
allows 65,530 in a process.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

_PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # Linux; the mmap module of Python 3.11 does not name it


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token: `kv_heads` heads of `head_dim` for keys and `value_dim` for values."""

    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Elements per token, keys and values together."""
        return self.kv_heads * (self.head_dim + self.value_dim)


def bytes_per_token(layers: list[LayerShape], dtype: torch.dtype) -> int:
    """Return the KV-cache bytes that one token occupies over all layers."""
    itemsize: int = dtype.itemsize
    return sum(layer.width for layer in layers) * itemsize


class KVCache:
    """`keys[layer]` and `values[layer]` are (slots, kv_heads, max_len, head_dim) tensors."""

    def __init__(
        self,
        layers: list[LayerShape],
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.max_len = _aligned_length(layers, max_len, dtype)
        self.bytes_per_token = bytes_per_token(layers, dtype)
        self._maps: list[mmap.mmap] = []
        self.keys = [
            self._allocate((slots, layer.kv_heads, self.max_len, layer.head_dim), dtype, device) for layer in layers
        ]
        self.values = [
            self._allocate((slots, layer.kv_heads, self.max_len, layer.value_dim), dtype, device) for layer in layers
        ]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy keys and values of the first `tokens` tokens of one slot to another."""
        for area in (*self.keys, *self.values):
            area[target, :, :tokens] = area[source, :, :tokens]

    def trim(self, slot: int, keep: int) -> None:
        """Give the memory behind all but the first `keep` tokens of a slot back to the system."""
        for area, tensor in zip(self._maps, (*self.keys, *self.values), strict=False):  # no maps beside the CPU
            token = tensor.stride(2) * tensor.itemsize
            stretch = self.max_len * token
            for head in range(slot * tensor.shape[1], (slot + 1) * tensor.shape[1]):
                begin = math.ceil((head * stretch + keep * token) / _PAGE) * _PAGE
                end = (head + 1) * stretch // _PAGE * _PAGE
                if begin < end:
                    area.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        # A huge page would make a whole stretch of a slot resident at its first token.
        area.madvise(mmap.MADV_NOHUGEPAGE)
        self._maps.append(area)
        return torch.frombuffer(area, dtype=dtype).view(shape)


def _aligned_length(layers: list[LayerShape], max_len: int, dtype: torch.dtype) -> int:
    """Round up so that every slot starts on a page of its own."""
    step = 1
    for layer in layers:
        for dim in (layer.head_dim, layer.value_dim):
            step = math.lcm(step, _PAGE // math.gcd(_PAGE, layer.kv_heads * dim * dtype.itemsize))
    return math.ceil(max_len / step) * step
