"""Lays weights out as the kernels read them: see cpu_kernels/blocks/layout.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from handlers.checkpoints.blocks.formats import StoredWeight
from handlers.cpu_kernels.blocks.layout import (
    ALIGNMENT,
    EXACT_ROWS,
    FIRST_PANEL,
    HAS_MINIMA,
    INPUTS,
    OUTPUTS,
    PANEL_WORDS,
    Q4,
    Q4_MIN,
    Q8,
    Kind,
)

KINDS = {"q8_0": Q8, "q4_0": Q4, "q4_1": Q4_MIN}
_ALL_ROWS = np.iinfo(np.int64).max

Panel = tuple[int, np.ndarray]
"""The code of a panel's kind, and its bytes."""


def lay_out(stored: StoredWeight) -> np.ndarray:
    """Return a weight in the layout of the kernels, int64."""
    kind = KINDS[stored.format.name]
    return _with_table([(kind.code, panel) for panel in _panels(stored, kind)], kind.has_minimum)


def join(laid: Sequence[np.ndarray]) -> np.ndarray:
    """Return weights of the same inputs as one, whose outputs follow each other. All but the last have whole panels."""
    panels = [panel for each in laid for panel in _panels_of(each)]
    return _with_table(panels, any(bool(each[HAS_MINIMA]) for each in laid))


def _with_table(panels: Sequence[Panel], has_minima: bool) -> np.ndarray:
    table = 8 * (FIRST_PANEL + PANEL_WORDS * len(panels))
    begins = np.cumsum([_aligned(table), *(_aligned(len(panel)) for _, panel in panels)]).tolist()
    laid = _aligned_words(begins[-1] // 8)
    laid[: begins[0] // 8] = 0
    laid[EXACT_ROWS], laid[HAS_MINIMA] = _ALL_ROWS, has_minima
    of_bytes = laid.view(np.uint8)
    for place, (code, panel) in enumerate(panels):
        first = FIRST_PANEL + PANEL_WORDS * place
        laid[first : first + PANEL_WORDS] = code, begins[place]
        of_bytes[begins[place] : begins[place] + len(panel)] = panel
    return laid


def _panels_of(laid: np.ndarray) -> Iterable[Panel]:
    """Yield the panels of a weight with its table; the first one begins behind the table."""
    table = laid[FIRST_PANEL : laid[FIRST_PANEL + 1] // 8].reshape(-1, PANEL_WORDS)
    panels = [(code, begin) for code, begin in table.tolist() if begin]
    of_bytes = laid.view(np.uint8)
    ends = [*(begin for _, begin in panels[1:]), of_bytes.size]
    for (code, begin), end in zip(panels, ends, strict=True):
        yield code, of_bytes[begin:end]


def _panels(stored: StoredWeight, kind: Kind) -> np.ndarray:
    """Return the panels of a weight, (panels, bytes) uint8."""
    found, outputs, blocks = stored.numbers(), len(stored.raw), stored.in_features // INPUTS

    def by_panel(of_outputs: torch.Tensor) -> torch.Tensor:
        """(out, blocks, ...) -> (panels, blocks, ..., OUTPUTS); zeros fill up the last panel."""
        missing = of_outputs.new_zeros((-outputs % OUTPUTS, *of_outputs.shape[1:]))
        return torch.cat((of_outputs, missing)).unflatten(0, (-1, OUTPUTS)).movedim(1, -1)

    halves = [found.scales] if found.minima is None else [found.scales, found.minima]
    numbers = by_panel(found.numbers.view(outputs, blocks, INPUTS))
    packed = numbers if kind.bits == 8 else _words_of_nibbles(numbers + kind.zero)
    parts = [*map(by_panel, halves), packed]
    laid: np.ndarray = (
        torch.cat([part.contiguous().view(torch.uint8).flatten(2) for part in parts], 2).flatten(1).numpy()
    )
    return laid


def _words_of_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """(panels, blocks, INPUTS, outputs) of 0 to 15 ->
    (panels, blocks, INPUTS / 8, outputs) int32: see `unpack_four`."""
    of_words = numbers.view(torch.uint8).unflatten(2, (-1, 8))
    words = torch.zeros_like(of_words[:, :, :, 0], dtype=torch.int32)
    for place in range(8):
        words |= of_words[:, :, :, place].int() << (4 * (place // 2) + 16 * (place % 2))
    return words


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned_words(count: int) -> np.ndarray:
    """Return an array of int64 that begins on a line of the caches."""
    room = np.empty(count + ALIGNMENT // 8, np.int64)
    first = -room.ctypes.data % ALIGNMENT // 8
    return room[first : first + count]
