"""Groups of arguments of the kernels, as named tuples.

numba knows named tuples: their fields become plain values in the compiled code, and a wrong name is an error when it
compiles. A call costs three microseconds more than with thirty single arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

CACHE_LINE = 64  # bytes
NO_TOKEN = -1
"""In place of the token of a row whose logits are not finite."""


class AttentionSettings(NamedTuple):
    """How a layer attends: `scaling` of the scores, above 0; `window` in tokens, 0 for all; `softcap`, 0 for none.

    A row sees nothing before the last multiple of `chunk`, 0 for no chunks. `threads` is how many share the work.
    `sinks`: for each head the score of a token without a value, (heads,) float32, or (0,) for none.
    """

    scaling: float
    window: int
    chunk: int
    softcap: float
    threads: int
    sinks: np.ndarray


class SlotSpan(NamedTuple):
    """Tokens `first:last` of a slot, which are the columns that a chunk attends to: of the KV cache, or of a copy."""

    slot: int
    first: int
    last: int


class SeenColumns(NamedTuple):
    """Which columns of the scores each row of a chunk may see; several chunks that share a prefix are one chunk here.

    The first columns are tokens `begin` to `start` - 1, which every row sees. Row r sees columns `first_own[r]` to
    `last_own[r]` - 1 as well: token `start` of its sequence and those after it, up to its own.
    """

    start: int
    begin: int
    first_own: np.ndarray
    last_own: np.ndarray

    @classmethod
    def from_lengths(cls, lengths: list[int], start: int, window: int, chunk: int = 0) -> SeenColumns:
        """Return it for sequences of `lengths` rows that share `start` tokens; window and chunk may leave some out."""
        begin = max(start + 1 - window if window else 0, start // chunk * chunk if chunk else 0, 0)
        ends = np.cumsum(lengths)
        firsts = np.repeat(ends - lengths, lengths)
        return cls(start, begin, firsts + (start - begin), np.arange(1, ends[-1] + 1) + (start - begin))


class DecodeRows(NamedTuple):
    """Rows that all attend one by one: `hidden` (n, width) uint16; `cosines`, `sines` (n, dim); the rest (n,) int64."""

    hidden: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray
    slots: np.ndarray
    positions: np.ndarray


class Activations(NamedTuple):
    """Room for what is between the parts of a layer, uint16: one row for each of DecodeRows.

    normed, added (n, width); projected (n, (heads + 2 * kv_heads) * dim); attended (n, heads, dim); gate_up
    (n, 2 * inner); activated (n, inner). All are contiguous.
    """

    normed: np.ndarray
    added: np.ndarray
    projected: np.ndarray
    attended: np.ndarray
    gate_up: np.ndarray
    activated: np.ndarray


class LayerArrays(NamedTuple):
    """The arrays of a decoder layer: caches as for `slot_attention`, norms (width,), linear layers as for `linear`.

    Or as for `block_linear` or `block_linear_int8`: each linear layer of its own.
    """

    keys: np.ndarray
    values: np.ndarray
    norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    o: np.ndarray
    o_bias: np.ndarray
    post_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray


class LayerSettings(NamedTuple):
    """Numbers that all decoder layers of a model share; the first three as in AttentionSettings.

    The others are of the norms: before attention, before the MLP, and behind the last layer.
    """

    scaling: float
    softcap: float
    threads: int
    epsilon: float
    post_epsilon: float
    last_epsilon: float


class SharedBlocks(NamedTuple):
    """This rank's view of the memory through which the ranks of a machine share activations.

    blocks (ranks, 2, block size) has two blocks of elements per rank. At the address `counters`, on a cache line of its
    own each, stands how many blocks a rank has published (int64). scratch (block size,) float32 is private to the rank.
    """

    blocks: np.ndarray
    counters: Any  # np.uintp
    rank: int
    scratch: np.ndarray
