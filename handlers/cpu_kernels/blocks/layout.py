"""How the kernels hold weights of few bits: in panels of 32 outputs, whose blocks have 32 inputs.

The weights of a linear layer are one array, which begins with a table of its panels. Panels of one layer may be of
different kinds, because files mix them. A panel is a run of super-blocks: of one block each, or of eight that share
factors, as ggml's K-quants have them. Each part of a block has all outputs beside each other, as lanes of vectors.

A super-block of eight begins with the factors of its scales, a float16 for each output, and those of its minima if
there are any. A block begins with its scales, then come its minima, both float16, or bytes if there are factors. The
numbers follow in two groups of 16 inputs, first their lowest bits, then the others. What vectors hold of a group are
pairs of neighbouring inputs in 8 outputs, one output after the other:

- Of 8 bits, a pair has four runs of 16 bytes, one for each quarter of the outputs. The pairs of a group follow.
- Of 4 bits, a group has four vectors of 16 words: two words for each output, of the first inputs and of the second
  inputs of its pairs. Bits 4 * p to 4 * p + 3 are of pair p.
- Of 6 bits, the lowest four are as before. For the upper two, both groups share four vectors: bits 2 * p and
  2 * p + 1 are of pair p in the first group, and 16 bits above of the second group.

For activations in 8 bits, numbers of 8 bits lie in quads of inputs, as ../int8/quantising.py describes them: a quad has
two vectors, one for each half of the outputs, with four bytes for each output. They are greater by 128 than what they
stand for, and so have no sign. Where tile registers multiply bytes, and all blocks of an output have one scale, a panel
begins with these scales as float32. Then quads follow each other up to the last block, and zeros fill up 64 inputs.

A weight is `scale * number - minimum`, where the number is the stored one less `zero`. Instead of minima, a block may
have a zero for each output, a byte: the number that stands for zero there. With a codebook the stored number is the
place of the number among 16 of float32, with which a panel begins; then scales are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OUTPUTS, INPUTS = 32, 32
"""Of a block."""
GROUP, GROUPS, QUADS = 16, 2, 4
"""Inputs of a group; how many groups a block has, and how many quads of inputs a group."""
SECTION = 8
"""Blocks that are unpacked at once, and those of a super-block that has factors."""
CODEBOOK_BYTES, SCALES_BYTES = 64, 4 * OUTPUTS
"""Of the codebook, or of the scales of the outputs, with which a panel of some kinds begins."""
ALIGNMENT = 64
"""Bytes of a line of the caches: panels begin on one."""
EXACT_ROWS, UNPACKED_ROWS, FIRST_PANEL, PANEL_WORDS = 0, 1, 2, 2
"""What the int64 at the beginning of a layer are.

First up to how many rows weights are multiplied as they are stored. Then up to how many rows they are unpacked, where
tile registers multiply more rows as bytes. Then PANEL_WORDS for each panel: the code of its kind, and how many bytes it
is behind the beginning.
"""


class Kind(NamedTuple):
    """A kind of blocks: its code in the table, the bits of a number, and the number that is stored for zero.

    `scales`: of a block for each output; two are those of its groups. With factors, scales are bytes: signed ones, or
    from 0 to 255 if there are minima. `has_zeros`: its minima are zeros that the scales multiply. `has_output_scales`:
    its scales are those of the outputs, with which a panel begins.
    """

    code: int
    bits: int
    zero: int = 0
    has_minimum: bool = False
    has_factors: bool = False
    scales: int = 1
    has_zeros: bool = False
    has_codebook: bool = False
    has_quads: bool = False
    has_output_scales: bool = False

    @property
    def blocks(self) -> int:
        """Of a super-block."""
        return SECTION if self.has_factors else 1

    @property
    def header_bytes(self) -> int:
        """How many bytes a panel has before its blocks."""
        return CODEBOOK_BYTES if self.has_codebook else SCALES_BYTES if self.has_output_scales else 0

    @property
    def factor_bytes(self) -> int:
        return 2 * OUTPUTS * (1 + self.has_minimum) if self.has_factors else 0

    @property
    def low_bits(self) -> int:
        """Of a number that are stored together: all eight, or the lowest four."""
        return 8 if self.bits == 8 else 4

    @property
    def scaled_groups(self) -> Sequence[Sequence[int]]:
        """The groups of a block, those together that share a scale."""
        return [range(GROUPS)] if self.scales == 1 else [[group] for group in range(GROUPS)]

    @property
    def scale_bytes(self) -> int:
        """How many bytes a scale has."""
        return 1 if self.has_factors else 4 if self.has_codebook or self.has_output_scales else 2

    @property
    def minimum_bytes(self) -> int:
        """How many bytes a minimum has, or a zero."""
        return 0 if not self.has_minimum else 1 if self.has_factors or self.has_zeros else 2

    @property
    def numbers_at(self) -> int:
        """How many bytes the numbers are behind the beginning of a block."""
        of_block = 0 if self.has_output_scales else self.scale_bytes * self.scales
        return OUTPUTS * (of_block + self.minimum_bytes)

    @property
    def block_bytes(self) -> int:
        return self.numbers_at + INPUTS * OUTPUTS * self.bits // 8

    @property
    def super_bytes(self) -> int:
        return self.factor_bytes + self.blocks * self.block_bytes


Q8 = Kind(0, 8)
Q4 = Kind(1, 4, zero=8)
Q4_MIN = Kind(2, 4, has_minimum=True)
Q4_SUPER = Kind(3, 4, has_minimum=True, has_factors=True)
Q6_MIN_SUPER = Kind(4, 6, has_minimum=True, has_factors=True)
Q6_SUPER = Kind(5, 6, zero=32, has_factors=True, scales=2)
Q4_ZERO = Kind(6, 4, has_minimum=True, has_zeros=True)
Q4_CODE = Kind(7, 4, has_codebook=True)
Q8_QUADS = Kind(8, 8, zero=128, has_quads=True)
Q8_TILES = Kind(9, 8, zero=128, has_quads=True, has_output_scales=True)
KINDS = (Q8, Q4, Q4_MIN, Q4_SUPER, Q6_MIN_SUPER, Q6_SUPER, Q4_ZERO, Q4_CODE, Q8_QUADS, Q8_TILES)
