"""The KV cache: slots, contiguous per head. `slots.py` decides what they hold, and how much.

A slot has addresses for `max_len` tokens, so that attention reads one contiguous stretch of memory per head and needs
no block table. On the CPU these addresses are only reserved: the operating system provides a page when it is first
written, and `trim` gives it back. So a slot for the whole context costs nothing until it is used, and the page table of
the operating system does the work of a block table, as in vAttention (Prabhu et al., ASPLOS 2025). On other devices
slots are plain tensors; there `max_len` is chosen such that all of them fit.

Slots do not share pages; a shared prefix is copied. Copying 1,024 tokens of 23 KB each takes 2 ms to memory that is
present and 8 ms to new pages, and computing them a second. The first step of a sequence reads the prefix in the other
slot, and the copy follows that step, off the critical path. Mapping the same pages twice takes 2 ms as well, but needs
a mapping per layer, head and slot, and Linux allows a process 65,530 of them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from handlers.cpu_kernels.row_layout import SCALE_BYTES
from lmi_server.contract.errors import ModelLoadError

_PAGE = mmap.PAGESIZE
_CPU = torch.device("cpu")
_MAP_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which the mmap module of Python 3.11 does not name


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token: `kv_heads` heads of `head_dim` for keys and `value_dim` for values.

    `device` is where the layer attends.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    device: torch.device = _CPU

    @property
    def width(self) -> int:
        """Elements per token, keys and values together."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def packed(self) -> LayerShape:
        """Return it for a cache whose rows, of PACKED_TYPES, have their scales behind them."""
        return replace(self, head_dim=self.head_dim + SCALE_BYTES, value_dim=self.value_dim + SCALE_BYTES)


PACKED_TYPES = {"int8": torch.int8, "fp8": torch.uint8}
"""Types of elements of a cache in 8 bits, by option.kv_cache_dtype: see `cpu_kernels/attention/packed_rows.py`."""


def kept_type(name: str | None, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a cache's elements for option.kv_cache_dtype, None for that of a model in `dtype`.

    Raises ModelLoadError if the model does not attend by the kernels that read rows in 8 bits.
    """
    if name is None:
        return dtype
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        raise no_packed_cache(
            name, f"the model is in {kind} on {device}, and kernels for bf16 and fp32 on the CPU read it"
        )
    return PACKED_TYPES[name]


def no_packed_cache(name: str, reason: str) -> ModelLoadError:
    """Return the error of a model whose cache cannot be in 8 bits."""
    return ModelLoadError(f"option.kv_cache_dtype={name}: {reason}; remove the key")


def unpack_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a cache, (..., dim), as `dtype`: packed ones times their scales, others as they are."""
    if rows.dtype not in PACKED_TYPES.values():
        return rows
    numbers = rows[..., :-SCALE_BYTES]
    numbers = numbers.view(torch.float8_e4m3fn) if rows.dtype == torch.uint8 else numbers
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (numbers.float() * scales.float()).to(dtype)


def bytes_per_token(layers: list[LayerShape], dtype: torch.dtype) -> int:
    """Return the KV-cache bytes that one token occupies over all layers."""
    itemsize: int = dtype.itemsize
    return sum(layer.width for layer in layers) * itemsize


def fitting_tokens(layers: Sequence[LayerShape], dtype: torch.dtype, room: Mapping[torch.device, float]) -> int:
    """Return how many tokens fit into `room`, the bytes on each device of the layers, for each layer on its device."""
    return min(
        int(size // bytes_per_token([layer for layer in layers if layer.device == device], dtype))
        for device, size in room.items()
    )


class KVCache:
    """`keys[layer]` and `values[layer]` are (slots, kv_heads, columns, head_dim) tensors on the layer's device.

    There are more columns than `max_len`: torch.compile would compile anew for a pass that reads all of them.
    """

    def __init__(self, layers: list[LayerShape], slots: int, max_len: int, dtype: torch.dtype) -> None:
        self.slots = slots
        self.max_len = max_len
        self._columns = _aligned_length(layers, max_len + 1, dtype)
        self.bytes_per_token = bytes_per_token(layers, dtype)
        self._maps: list[mmap.mmap] = []
        self.keys = [
            self._allocate((slots, layer.kv_heads, self._columns, layer.head_dim), dtype, layer.device)
            for layer in layers
        ]
        self.values = [
            self._allocate((slots, layer.kv_heads, self._columns, layer.value_dim), dtype, layer.device)
            for layer in layers
        ]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy keys and values of the first `tokens` tokens of one slot to another."""
        for area in (*self.keys, *self.values):
            area[target, :, :tokens] = area[source, :, :tokens]

    def trim(self, slot: int, keep: int) -> None:
        """Give the memory behind all but the first `keep` tokens of a slot back to the system.

        Only whole pages can go: the ones that also hold a token to keep, or a neighbouring head, stay.
        """
        for area, tensor in zip(
            self._maps, (*self.keys, *self.values), strict=False
        ):  # on other devices there are no maps
            token = tensor.stride(2) * tensor.itemsize
            stretch = self._columns * token
            for head in range(slot * tensor.shape[1], (slot + 1) * tensor.shape[1]):
                begin = math.ceil((head * stretch + keep * token) / _PAGE) * _PAGE
                end = (head + 1) * stretch // _PAGE * _PAGE
                if begin < end:
                    area.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def give_back(self) -> None:
        """Give all memory back to the system where it is pages of the host; every slot holds zeros then."""
        for area in self._maps:
            area.madvise(mmap.MADV_DONTNEED)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = math.prod(shape) * dtype.itemsize
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        # A huge page (2 MiB) would provide memory for hundreds of tokens when the first one is written.
        area.madvise(mmap.MADV_NOHUGEPAGE)
        self._maps.append(area)
        return torch.frombuffer(area, dtype=dtype).view(shape)


def _aligned_length(layers: list[LayerShape], length: int, dtype: torch.dtype) -> int:
    """Round `length` up so that no page belongs to two slots, and all memory of a slot can be given back.

    Only main memory is given back.
    """
    step = 1
    for layer in (layer for layer in layers if layer.device.type == "cpu"):
        for dim in (layer.head_dim, layer.value_dim):
            step = math.lcm(step, _PAGE // math.gcd(_PAGE, layer.kv_heads * dim * dtype.itemsize))
    return math.ceil(length / step) * step
