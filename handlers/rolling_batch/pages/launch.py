"""Launches the Triton kernels of kernels.py: chooses their tiles, and the splits of the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from handlers.rolling_batch.pages.kernels import chunk_kernel, decode_kernel, reduce_kernel, write_kernel

MAX_SPLITS = 64
_MIN_TILE = 16  # what tensor cores multiply at least
_FEW_ROWS = 16
_FLOAT32 = 4  # bytes
_QUERIES = 1 / 6  # of the shared memory of a multiprocessor, for the queries of a tile of rows
_LARGE_TILE = 2**13  # elements of such a tile, from which on it takes more than 4 warps
_SHARED = 0.45  # of the shared memory of a multiprocessor, for the tiles of one program: two of them run at a time


@dataclass(frozen=True)
class PageLayer:
    """How a layer attends: heads and widths, `page` tokens in a page, and what bounds or changes its scores.

    `window` and `chunk` are in tokens, 0 for none; `softcap` is 0 for none; `sinks` says whether each head has one.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    page: int
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def widths(self) -> dict[str, int]:
        """The arguments of the kernels that are about heads and widths."""
        return {
            "KV_HEADS": self.kv_heads,
            "DIM": self.dim,
            "DIM_PAD": padded(self.dim),
            "VALUE_DIM": self.value_dim,
            "VALUE_PAD": padded(self.value_dim),
        }

    @property
    def scores(self) -> dict[str, Any]:
        """The arguments of the kernels that are about scores."""
        return {"WINDOW": self.window, "CHUNK": self.chunk, "SINKS": self.sinks}


@dataclass(frozen=True)
class Tuning:
    """What the launches choose tiles by: a GPU's multiprocessors, the bytes of shared memory of each, and preferences.

    The preferred tiles are columns of the context, and rows of prompts. They are halved until they fit. Several stages
    of a loop are loaded at a time. `programs` of a decode launch keep a multiprocessor busy: with fewer some of them
    wait for the others.
    """

    processors: int
    shared: int
    decode_tile: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    programs: int = 8
    chunk_rows: int = 128
    chunk_tile: int = 128
    chunk_stages: int = 2
    chunk_warps: int = 8

    @classmethod
    def from_torch(cls, device: torch.device) -> Tuning:
        """Ask torch; without a GPU, for the interpreter, return numbers that let everything be tried."""
        if device.type != "cuda":
            return cls(4, 2**17)
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", 0) or 2**16
        return cls(properties.multi_processor_count, shared)


def padded(size: int) -> int:
    """Return the least power of two that tensor cores take, from `size` on."""
    return max(_MIN_TILE, 1 << (size - 1).bit_length())


def decode_options(layer: PageLayer, itemsize: int, tuning: Tuning) -> dict[str, int]:
    """Return tile, warps and stages of `decode_kernel`."""
    stages = tuning.decode_stages if itemsize < _FLOAT32 else 2
    tile = _tile(layer, itemsize, tuning.decode_tile, stages - 1, tuning.shared * _SHARED)
    return {"TILE": tile, "num_warps": tuning.decode_warps, "num_stages": stages}


def chunk_options(layer: PageLayer, itemsize: int, tuning: Tuning, rows: int) -> dict[str, int]:
    """Return rows and columns of a tile, warps and stages of `chunk_kernel` for chunks of up to `rows` rows."""
    width = padded(max(layer.dim, layer.value_dim))
    fitting = 1 << (int(tuning.shared * _QUERIES) // (width * itemsize)).bit_length() - 1
    tile_rows = max(_FEW_ROWS, min(tuning.chunk_rows, fitting))
    if rows <= _FEW_ROWS or itemsize >= _FLOAT32:  # products in float32 take no tensor cores, but many registers
        tile_rows = _FEW_ROWS
    room = tuning.shared * 2 * _SHARED - tile_rows * padded(layer.dim) * itemsize
    tile = _tile(layer, itemsize, tuning.chunk_tile, tuning.chunk_stages, room)
    warps = tuning.chunk_warps if tile_rows * width >= _LARGE_TILE else 4
    return {"ROWS": tile_rows, "TILE": tile, "num_warps": warps, "num_stages": tuning.chunk_stages}


def _tile(layer: PageLayer, itemsize: int, most: int, buffers: int, room: float) -> int:
    """Return up to `most` columns whose keys and values take up to `room` bytes in so many buffers."""
    width = (padded(layer.dim) + padded(layer.value_dim)) * itemsize
    while most > _MIN_TILE and buffers * most * width > room:
        most //= 2
    return most


def chain_options(chained: bool) -> dict[str, bool]:
    """Return the options of a launch that may begin before the one in front of it has ended."""
    return {"launch_pdl": True} if chained else {}


def splits_for(rows: int, kv_heads: int, tuning: Tuning) -> int:
    """Return into how many parts a decode launch splits the context: a power of two."""
    wanted = tuning.processors * tuning.programs // (rows * kv_heads)
    return 1 << max(0, min(wanted, MAX_SPLITS).bit_length() - 1)


def row_major(states: torch.Tensor) -> torch.Tensor:
    """Return (heads, rows, dim) as (rows, heads, dim) whose rows are contiguous, copied only if they are not."""
    rows = states.transpose(0, 1)
    width = rows.shape[2]
    return rows if rows.stride(2) == 1 and rows.stride(1) == width else rows.contiguous()


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    layer: PageLayer,
) -> None:
    """Write keys and values, (rows, kv_heads, dim), of tokens at `positions` of `slots`, (rows,) each."""
    if len(slots):
        write_kernel[(len(slots),)](
            key, value, key_pages, value_pages, tables, slots, positions, key.stride(0), value.stride(0),
            tables.stride(0), **layer.widths, HEADS_PAD=1 << (layer.kv_heads - 1).bit_length(), PAGE=layer.page,
        )  # fmt: skip


def decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rows: int,
    out: torch.Tensor,
    scaling: float,
    layer: PageLayer,
    tuning: Tuning,
    sinks: torch.Tensor | None = None,
    chained: bool = False,
    usual: int = 0,
) -> None:
    """Attend for the first `rows` rows of `query`, (rows, heads, dim), into `out`; not for rows at position -1.

    `chained`: the launches may begin before the one in front of them has ended. `usual`: of how many rows the launch
    is to keep the GPU busy, 0 for all of them.
    """
    options = decode_options(layer, query.element_size(), tuning)
    splits = splits_for(usual or rows, layer.kv_heads, tuning)
    group = layer.heads // layer.kv_heads
    partial, weights = out, out
    if splits > 1:
        partial = out.new_empty((rows, layer.heads, splits, layer.value_dim), dtype=torch.float32)
        weights = out.new_empty((rows, layer.heads, splits, 2), dtype=torch.float32)
    sunk = out if sinks is None else sinks
    decode_kernel[(rows, layer.kv_heads, splits)](
        query, key_pages, value_pages, tables, slots, positions, sunk, partial, weights, out, scaling,
        query.stride(0), tables.stride(0), GROUP=group, GROUP_PAD=padded(group), PAGE=layer.page,
        SOFTCAP=layer.softcap, DIRECT=splits == 1, CHAINED=chained, **layer.widths, **layer.scores, **options,
        **chain_options(chained),
    )  # fmt: skip
    if splits > 1:
        reduce_kernel[(rows, layer.heads)](
            partial, weights, positions, sunk, out, splits, HEADS=layer.heads, VALUE_DIM=layer.value_dim,
            VALUE_PAD=padded(layer.value_dim), SPLITS_PAD=MAX_SPLITS, TILE=options["TILE"], CHAINED=chained,
            **layer.scores, **chain_options(chained),
        )  # fmt: skip


def chunks(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    described: torch.Tensor,
    most: int,
    out: torch.Tensor,
    scaling: float,
    layer: PageLayer,
    tuning: Tuning,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Attend for chunks, `described` as `chunk_kernel` needs it, the longest of `most` rows, into `out`.

    `ends`, (rows,) int32, has the last token that each row sees; None: its own.
    """
    options = chunk_options(layer, query.element_size(), tuning, most)
    grid = (-(-most // options["ROWS"]), layer.heads, len(described))
    chunk_kernel[grid](
        query, key_pages, value_pages, tables, described, described if ends is None else ends,
        out if sinks is None else sinks, out, scaling, query.stride(0), tables.stride(0), HEADS=layer.heads,
        PAGE=layer.page, SOFTCAP=layer.softcap, BLOCKS=ends is not None, **layer.widths, **layer.scores, **options,
    )  # fmt: skip
