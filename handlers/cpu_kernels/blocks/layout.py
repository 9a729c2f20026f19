"""How the kernels hold weights of few bits: in panels of 32 outputs, of which a block has 32 inputs.

The weights of a linear layer are one array, which begins with a table of its panels. Panels of one layer may be of
different kinds, because files mix them. All parts of a block have their outputs beside each other, as lanes of vectors,
so that one load serves 16 or 32 outputs. The scales of a block come first, as float16, then the minima if there are
any, then the numbers. The numbers of bytes are those of ggml's formats.

A weight is `scale * number - minimum`, where the number is an integer of so few bits that bfloat16 holds it exactly.
"""

from __future__ import annotations

from typing import NamedTuple

OUTPUTS, INPUTS = 32, 32
"""Of a block."""
SECTION = 8
"""Blocks that are unpacked at once."""
ALIGNMENT = 64
"""Bytes of a line of the caches: panels begin on one."""
EXACT_ROWS, HAS_MINIMA, FIRST_PANEL, PANEL_WORDS = 0, 1, 2, 2
"""What the int64 at the beginning of a layer are.

First up to how many rows weights are multiplied unrounded; then whether any panel has minima; then PANEL_WORDS for each
panel: the code of its kind, and how many bytes it is behind the beginning.
"""


class Kind(NamedTuple):
    """A kind of blocks: its code in the table, the bits of a number, and the number that is stored for zero."""

    code: int
    bits: int
    zero: int = 0
    has_minimum: bool = False

    @property
    def block_bytes(self) -> int:
        return INPUTS * OUTPUTS * self.bits // 8 + 2 * OUTPUTS * (1 + self.has_minimum)


Q8 = Kind(0, 8)
Q4 = Kind(1, 4, zero=8)
Q4_MIN = Kind(2, 4, has_minimum=True)
