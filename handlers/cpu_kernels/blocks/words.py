"""The products of several rows of bfloat16 and blocks of few bits, in integers of 16 bits.

Their integers, and the order in which these are scaled and added, are those of `multiply_row`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# llvmlite and numba's typing objects are untyped.

from __future__ import annotations

from handlers.cpu_kernels import byte_products
from handlers.cpu_kernels.blocks.integers import SCALE_OF_WORDS_AT, SUM_OF_WORDS_AT, WORDS_BYTES, add_words, multiplies
from handlers.cpu_kernels.blocks.laid import Form, in_sections
from handlers.cpu_kernels.blocks.layout import KINDS
from handlers.cpu_kernels.blocks.reading import Block
from handlers.cpu_kernels.blocks.vectors import PAIRS, WORDS

IS_USABLE = byte_products.HAS_VNNI
"""Whether the processor multiplies pairs of words."""
ROWS = 4
"""How many rows are a group, which is multiplied at once."""
_FEW = 2  # groups, at most, that are multiplied by blocks as they are stored
_SECTION = 8  # blocks, at most, that are laid


def _numbers(builder, block: Block, group):
    words_of = block.numbers.words(group)
    for pair in range(PAIRS):
        yield [builder.bitcast(words, WORDS) for words in words_of(pair)]


_KINDS = [kind for kind in KINDS if multiplies(kind)] if IS_USABLE else []
_FORM = Form(_KINDS, PAIRS, _numbers, add_words, WORDS_BYTES, SCALE_OF_WORDS_AT, SUM_OF_WORDS_AT)
KINDS_IN_WORDS = sum(1 << kind.code for kind in _KINDS)
"""The kinds of blocks that several rows multiply so, as bits."""
add_products, LAID_BYTES = in_sections(_FORM, ROWS, _FEW, _SECTION)
