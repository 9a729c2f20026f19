"""Lays weights out as the kernels read them: see cpu_kernels/blocks/layout.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from handlers.checkpoints.blocks.formats import StoredWeight
from handlers.cpu_kernels.blocks.layout import (
    ALIGNMENT,
    EXACT_ROWS,
    FIRST_PANEL,
    GROUP,
    INPUTS,
    OUTPUTS,
    PANEL_WORDS,
    Q4,
    Q4_CODE,
    Q4_MIN,
    Q4_SUPER,
    Q4_ZERO,
    Q6_MIN_SUPER,
    Q6_SUPER,
    Q8,
    Q8_QUADS,
    Q8_TILES,
    QUADS,
    UNPACKED_ROWS,
    Kind,
)

KINDS = {
    "q8_0": Q8,
    "q4_0": Q4,
    "q4_1": Q4_MIN,
    "q4_k": Q4_SUPER,
    "q5_k": Q6_MIN_SUPER,
    "q6_k": Q6_SUPER,
    "q4_zero": Q4_ZERO,
    "q4_code": Q4_CODE,
}
FEW_ROWS = 4
"""Up to how many rows weights are multiplied as they are stored, if it is not measured."""

Panel = tuple[int, np.ndarray]
"""The code of a panel's kind, and its bytes."""


def lay_out(stored: StoredWeight) -> np.ndarray:
    """Return a weight in the layout of the kernels, int64."""
    kind = KINDS[stored.format.name]
    return _with_table([(kind.code, panel) for panel in _panels(stored, kind)])


def join(laid: Sequence[np.ndarray]) -> np.ndarray:
    """Return weights of the same inputs as one, whose outputs follow each other. All but the last have whole panels."""
    panels = [panel for each in laid for panel in _panels_of(each)]
    return _with_table(panels)


def in_quads(laid: np.ndarray, for_tiles: bool = False) -> np.ndarray:
    """Return a weight in the layout for activations in 8 bits: numbers of 8 bits in quads, all others as they are.

    `for_tiles`: panels whose outputs have one scale each lie as tile registers read them.
    """
    return _with_table(
        [_in_quads(panel, for_tiles) if code == Q8.code else (code, panel) for code, panel in _panels_of(laid)]
    )


def is_for_tiles(laid: np.ndarray) -> bool:
    """Whether tile registers read all panels of a weight as they lie."""
    table = _table_of(laid)
    return bool((table[table[:, 1] > 0, 0] == Q8_TILES.code).all())


def _in_quads(panel: np.ndarray, for_tiles: bool) -> Panel:
    """Return a panel of 8 bits with its numbers in quads, and without signs."""
    whole = panel[: len(panel) // Q8.super_bytes * Q8.super_bytes].reshape(-1, Q8.super_bytes)
    # (blocks, groups, places, quads // 2, OUTPUTS, 2): pair 2 * place + n has inputs of quads 2 * n and 2 * n + 1.
    pairs = whole[:, Q8.numbers_at :].reshape(-1, INPUTS // GROUP, GROUP // QUADS, QUADS // 2, OUTPUTS, 2)
    quads = pairs.transpose(0, 1, 3, 5, 4, 2) ^ 128
    scales, numbers = whole[:, : Q8.numbers_at], quads.reshape(len(whole), -1)
    if for_tiles and bool((scales == scales[0]).all()):
        of_outputs = np.ascontiguousarray(scales[0]).view(np.float16).astype(np.float32).view(np.uint8)
        missing = np.zeros(len(whole) % 2 * Q8_TILES.block_bytes, np.uint8)  # a tile has the inputs of two blocks
        return Q8_TILES.code, np.concatenate((of_outputs, numbers.reshape(-1), missing))
    return Q8_QUADS.code, np.concatenate((scales, numbers), axis=1).reshape(-1)


def _with_table(panels: Sequence[Panel]) -> np.ndarray:
    table = 8 * (FIRST_PANEL + PANEL_WORDS * len(panels))
    begins = np.cumsum([_align(table), *(_align(len(panel)) for _, panel in panels)]).tolist()
    laid = _aligned_words(begins[-1] // 8)
    laid[: begins[0] // 8] = 0
    laid[EXACT_ROWS], laid[UNPACKED_ROWS] = FEW_ROWS, sys.maxsize
    of_bytes = laid.view(np.uint8)
    for place, (code, panel) in enumerate(panels):
        first = FIRST_PANEL + PANEL_WORDS * place
        laid[first : first + PANEL_WORDS] = code, begins[place]
        of_bytes[begins[place] : begins[place] + len(panel)] = panel
    return laid


def _panels_of(laid: np.ndarray) -> Iterable[Panel]:
    """Yield the panels of a weight with its table; the first one begins behind the table."""
    panels = [(code, begin) for code, begin in _table_of(laid).tolist() if begin]
    of_bytes = laid.view(np.uint8)
    ends = [*(begin for _, begin in panels[1:]), of_bytes.size]
    for (code, begin), end in zip(panels, ends, strict=True):
        yield code, of_bytes[begin:end]


def _table_of(laid: np.ndarray) -> np.ndarray:
    """Return the codes of a weight's panels and where these begin, (n, 2); a panel at 0 is none."""
    return laid[FIRST_PANEL : laid[FIRST_PANEL + 1] // 8].reshape(-1, PANEL_WORDS)


def _panels(stored: StoredWeight, kind: Kind) -> np.ndarray:
    """Return the panels of a weight, (panels, bytes) uint8."""
    found, outputs, blocks = stored.numbers(), len(stored.raw), stored.in_features // INPUTS

    def by_panel(of_outputs: torch.Tensor) -> torch.Tensor:
        """(out, n, ...) -> (panels, n, ..., OUTPUTS); zeros fill up the last panel."""
        missing = of_outputs.new_zeros((-outputs % OUTPUTS, *of_outputs.shape[1:]))
        return torch.cat((of_outputs, missing)).unflatten(0, (-1, OUTPUTS)).movedim(1, -1)

    def of_blocks(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """Return the bytes of parts beside each other, (panels, count, bytes)."""
        return torch.cat(
            [part.contiguous().view(torch.uint8).unflatten(1, (count, -1)).flatten(2) for part in parts], 2
        )

    scales = [by_panel(part) for part in (found.scales, found.minima, found.zeros) if part is not None]
    numbers = by_panel((found.numbers + kind.zero if kind.bits < 8 else found.numbers).view(outputs, blocks, INPUTS))
    laid = of_blocks([*scales, *_laid_numbers(numbers, kind)], blocks)
    if kind.has_factors:
        factors = [by_panel(part) for part in (found.factors, found.minimum_factors) if part is not None]
        count = blocks // kind.blocks
        laid = torch.cat((of_blocks(factors, count), laid.unflatten(1, (count, -1)).flatten(2)), 2)
    panels = laid.flatten(1)
    if found.codebook is not None:
        panels = torch.cat((found.codebook.view(torch.uint8).expand(len(panels), -1), panels), 1)
    of_bytes: np.ndarray = panels.numpy()
    return of_bytes


def _laid_numbers(numbers: torch.Tensor, kind: Kind) -> list[torch.Tensor]:
    """Return parts that hold the stored numbers, (panels, blocks, INPUTS, OUTPUTS) int8, as the kernels read them."""
    # (panels, blocks, groups, pairs, OUTPUTS, 2): vectors hold neighbouring inputs side by side.
    paired = numbers.unflatten(2, (INPUTS // GROUP, GROUP // 2, 2)).transpose(4, 5)
    if kind.bits == 8:
        return [paired.flatten(2, 3)]
    of_bytes = paired.contiguous().view(torch.uint8)
    low = torch.zeros_like(of_bytes[:, :, :, 0], dtype=torch.int32)
    high = torch.zeros_like(of_bytes[:, :, 0, 0], dtype=torch.int32)
    for pair in range(GROUP // 2):
        low |= (of_bytes[:, :, :, pair].int() & 15) << (4 * pair)
        for group in range(INPUTS // GROUP):
            high |= (of_bytes[:, :, group, pair].int() >> 4) << (2 * pair + 16 * group)
    return [low] if kind.bits == 4 else [low, high]


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned_words(count: int) -> np.ndarray:
    """Return an array of int64 that begins on a line of the caches."""
    room = np.empty(count + ALIGNMENT // 8, np.int64)
    first = -room.ctypes.data % ALIGNMENT // 8
    return room[first : first + count]
