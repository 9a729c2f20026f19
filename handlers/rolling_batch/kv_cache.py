"""The KV cache: one slot per running sequence, contiguous per head, its memory bounded when the model loads.

A slot is addressed as if it held `max_len` tokens, so that attention reads one contiguous stretch per head and needs no
block table. On the CPU the slots are only reserved address space: a page becomes memory when it is first written, and
the pages of released slots go back before more than `kv_tokens` tokens could be resident. The operating system's page
table is the block table, as in vAttention (Prabhu et al., ASPLOS 2025). On other devices the slots are plain tensors,
so that `max_len` is chosen there such that all of them fit.
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
    return sum(layer.width for layer in layers) * dtype.itemsize


class KVCache:
    """`keys[layer]` and `values[layer]` are (slots, kv_heads, max_len, head_dim) tensors."""

    def __init__(
        self,
        layers: list[LayerShape],
        slots: int,
        max_len: int,
        kv_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_len = _aligned_length(layers, max_len, dtype)
        self.kv_tokens = kv_tokens
        self.bytes_per_token = bytes_per_token(layers, dtype)
        self._free = list(range(slots - 1, -1, -1))
        self._resident = [0] * slots  # tokens of each slot that may be in memory
        self._needed = [0] * slots  # tokens that the slot's sequence may write; 0 for a free slot
        self._maps: list[mmap.mmap] = []
        self.keys = [
            self._allocate((slots, layer.kv_heads, self.max_len, layer.head_dim), dtype, device) for layer in layers
        ]
        self.values = [
            self._allocate((slots, layer.kv_heads, self.max_len, layer.value_dim), dtype, device) for layer in layers
        ]

    @property
    def used_slots(self) -> int:
        return len(self._resident) - len(self._free)

    @property
    def resident_tokens(self) -> int:
        """Tokens whose memory may be in use, those of released slots included; never more than `kv_tokens`."""
        return sum(self._resident)

    def acquire(self, tokens: int) -> int:
        """Return a free slot for a sequence of up to `tokens` tokens; the scheduler admitted no more than fit."""
        slot = self._free.pop()
        self._needed[slot] = tokens
        self._resident[slot] = max(self._resident[slot], tokens)
        for other in range(len(self._resident)):
            if self.resident_tokens <= self.kv_tokens:
                break
            if self._resident[other] > self._needed[other]:
                self._drop_pages(other)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot. Its pages stay resident for the next sequence until their room is needed."""
        self._needed[slot] = 0
        self._free.append(slot)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        # A huge page would make a whole stretch of a slot resident at its first token.
        area.madvise(mmap.MADV_NOHUGEPAGE)
        self._maps.append(area)
        return torch.frombuffer(area, dtype=dtype).view(shape)

    def _drop_pages(self, slot: int) -> None:
        """Give the memory behind the tokens that the slot needs back to the system."""
        needed = self._needed[slot]
        areas = zip(self._maps, (*self.keys, *self.values), strict=True) if self._maps else ()
        for area, tensor in areas:
            token = tensor.stride(2) * tensor.itemsize
            stretch = self.max_len * token
            for head in range(slot * tensor.shape[1], (slot + 1) * tensor.shape[1]):
                begin = math.ceil((head * stretch + needed * token) / _PAGE) * _PAGE
                end = (head + 1) * stretch // _PAGE * _PAGE
                if begin < end:
                    area.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        self._resident[slot] = needed


def _aligned_length(layers: list[LayerShape], max_len: int, dtype: torch.dtype) -> int:
    """Round up so that every slot starts on a page of its own."""
    step = 1
    for layer in layers:
        for dim in (layer.head_dim, layer.value_dim):
            step = math.lcm(step, _PAGE // math.gcd(_PAGE, layer.kv_heads * dim * dtype.itemsize))
    return math.ceil(max_len / step) * step
